"""The record of which samples each data rank read, for those who want to check."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path


def append_samples(
    file: Path, step: int, generation: int, world_rank: int, ids: Sequence[int]
) -> None:
    """Append one line with a step's sample ids, in a single write: those of others never mix."""
    row = {"step": step, "generation": generation, "world_rank": world_rank, "ids": list(ids)}
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, f"{json.dumps(row)}\n".encode())
    finally:
        os.close(descriptor)
