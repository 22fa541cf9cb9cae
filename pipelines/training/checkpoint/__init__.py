"""Checkpoint files: reading any region from parts written under any layout."""
