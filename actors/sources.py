"""One digest of all sources that workers must agree on."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

PACKAGES = ("elastic", "actors", "pipelines")


@cache
def digest_of_sources() -> str:
    """SHA-256 over the Python files of the three packages, wherever they are installed."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
