"""Checkpoint shards: writing them, and reading any region from shards of any layout."""
