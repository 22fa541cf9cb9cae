"""Datasets whose samples raise, hang, kill the process or take long."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info

BAD_SAMPLE = 13


class Row(NamedTuple):
    image: torch.Tensor
    name: str


class Numbers:
    """Each sample has its index, and numbers from the three global generators."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, object]:
        drawn = torch.rand(2)
        return {
            "index": torch.tensor(index),
            "drawn": drawn,
            "array": np.full(3, index, dtype=np.int16),
            "row": Row(torch.full((2, 2), index, dtype=torch.bfloat16), f"sample {index}"),
            "nothing": torch.empty(0, 4),
        }


@dataclass
class Bad:
    """Sample `BAD_SAMPLE` does something bad; if `once_file` is given, only until that exists."""

    what: str
    once_file: Path | None = None

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == BAD_SAMPLE and not (self.once_file and self.once_file.exists()):
            if self.once_file:
                self.once_file.touch()
            self._misbehave()
        return torch.tensor(index)

    def _misbehave(self) -> None:
        match self.what:
            case "raise":
                raise KeyError("no label")
            case "die":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(1000)


class Pids:
    """Each sample is the process that read it, and torch's number of that process."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = get_worker_info()
        assert info is not None and info.num_workers == 2
        time.sleep(0.005)
        return os.getpid(), info.id


def keep(items: list[object]) -> list[object]:
    return items
