"""Storage: files by URL, line logs, the lease, checkpoint files."""
