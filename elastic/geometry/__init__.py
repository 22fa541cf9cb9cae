"""Geometry of a run: layouts, assignments, tensor specs, regions, shard maps, sample order, topology."""
