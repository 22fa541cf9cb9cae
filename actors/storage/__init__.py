"""Storage: files by URL, append-only line logs, the run's lease, checkpoint files."""
