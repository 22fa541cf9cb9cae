"""Geometry of a run: layouts, assignments, regions, shard maps, sample order, topology."""
