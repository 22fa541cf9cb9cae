"""Several workers on one GPU: NCCL treats each process as a separate machine."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from pipelines.run.program import TrainingProgram

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def claim_separate_host() -> None:
    """NCCL refuses two ranks on one GPU of one host; call this before it is first used.

    Ranks on different hosts communicate through sockets, here over the loopback interface.
    """
    os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_IB_DISABLE"] = "1"


def program(settings: dict[str, Any]) -> TrainingProgram:
    """The training program of a worker on the shared GPU."""
    claim_separate_host()
    return TrainingProgram(settings, device="cuda")


def program_on_cpu(settings: dict[str, Any]) -> TrainingProgram:
    """The training program on the CPU, even if there is a GPU."""
    return TrainingProgram(settings, device="cpu")
