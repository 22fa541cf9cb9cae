"""Capacity: which workers the next generation has, and when the run grows."""
