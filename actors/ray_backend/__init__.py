"""Ray backend: everything that imports Ray."""
