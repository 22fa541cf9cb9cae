"""Distributed: process groups, device meshes, abort, state transfer, the store."""
