"""The sidecar process of a run, which follows its files: tracking, metrics, notifications."""
