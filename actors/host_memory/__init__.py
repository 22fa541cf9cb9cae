"""Copies between a GPU and host memory that do not stall the GPU."""
