"""Duties of the controller that depend on no phase: recovery, checkpoints, membership and others."""
