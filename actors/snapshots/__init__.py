"""Snapshots: the snapshot server, its buffers and parities, and the workers' side of them."""
