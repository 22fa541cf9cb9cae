"""Makes the harness of the process tests, and what `make gpu` measures, importable here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "processes"))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(scope="session")
def gpu() -> None:
    """Skip where there is no GPU. Asked only here: the fork server imports the modules beside this
    file, and a child of a process that has asked cannot use CUDA."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
