"""The process beside a run that follows its files: tracking, metrics, notifications."""
