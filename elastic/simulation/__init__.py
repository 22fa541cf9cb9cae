"""Simulation of availability: traces of nodes, what a run costs, and restart-based systems."""
