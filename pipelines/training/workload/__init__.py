"""Workload: what is trained, independent of how it is distributed."""
