"""Expansion of `~` and `~name` in paths that users write."""

from __future__ import annotations

import os
from pathlib import Path


def expand_home(path: str | Path) -> Path:
    """The path with `~` replaced by the home folder.

    For an unknown user name the path stays unchanged and so does not exist, where
    `Path.expanduser` would raise.
    """
    return Path(os.path.expanduser(path))
