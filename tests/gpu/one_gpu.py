"""Several workers on one GPU: NCCL treats each process as a separate machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_groups import separate_hosts

from pipelines.run.program import TrainingProgram

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def program(**kwargs: Any) -> TrainingProgram:
    """The training program of a worker on the shared GPU."""
    separate_hosts()
    return TrainingProgram(**kwargs, device="cuda")


def program_on_cpu(**kwargs: Any) -> TrainingProgram:
    """The training program on the CPU, even if there is a GPU."""
    return TrainingProgram(**kwargs, device="cpu")
