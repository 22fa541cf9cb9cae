"""Paths as users write them: `~` and `~name` stand for home folders."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """The path with its home folder; as it is where nobody has that name, which then does not
    exist. (`Path.expanduser` raises there.)"""
    return Path(os.path.expanduser(path))
