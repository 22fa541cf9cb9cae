"""Several workers on one GPU: NCCL treats each process as a separate machine."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_groups import separate_hosts

from pipelines.run.program import TrainingProgram

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


def program(**kwargs: Any) -> TrainingProgram:
    """The training program of a worker on the shared GPU."""
    separate_hosts()
    return TrainingProgram(**kwargs, device="cuda")


def program_on_cpu(**kwargs: Any) -> TrainingProgram:
    """The training program on the CPU, even if there is a GPU."""
    return TrainingProgram(**kwargs, device="cpu")
