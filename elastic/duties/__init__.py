"""Duties of the controller that belong to no single phase: recovery, checkpoints, membership,
..."""
