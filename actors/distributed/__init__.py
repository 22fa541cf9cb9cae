"""Distributed: process groups, meshes, abort, moving bytes, the store."""
