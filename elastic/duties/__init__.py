"""Duties of the controller that belong to no phase: recovery, checkpoints, membership, ..."""
