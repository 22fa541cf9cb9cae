"""Planner: candidate layouts, step cost, memory model, placement of ranks."""
