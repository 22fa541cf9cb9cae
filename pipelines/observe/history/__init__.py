"""The history of a run, folded from its files."""
