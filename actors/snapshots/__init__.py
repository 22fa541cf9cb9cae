"""Snapshots: the snapshot server, its buffers, and the way there."""
