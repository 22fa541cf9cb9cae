"""A digest of the sources that driver, controller and workers must agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from elastic.geometry.tensor_specs import TensorSpec

PACKAGES = ("elastic", "actors", "pipelines")


@cache
def digest_of_sources() -> str:
    """SHA-256 over the Python files of the three packages, wherever they are installed."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def digest_of_program(specs: Sequence[TensorSpec]) -> str:
    """SHA-256 over the sources and the tensor specs of a run's program."""
    return hashlib.sha256(f"{digest_of_sources()} {tuple(specs)}".encode()).hexdigest()
