"""Duties of the controller outside any single phase: recovery, checkpoints, membership, ..."""
