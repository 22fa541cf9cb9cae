"""Passes: forward and backward over microbatches, and the pipeline schedules."""
