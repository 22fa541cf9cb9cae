"""The history of a run, computed from its files."""
