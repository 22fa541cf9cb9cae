"""Modules of recipes and scripts: built, cut into blocks and stages, and run on microbatches."""
