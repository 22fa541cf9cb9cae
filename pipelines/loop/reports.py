"""Numbers that a script reports with a step, averaged over all workers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from actors.distributed.stall import wait_for
from actors.runtime.program import Groups, Interrupt
from elastic.protocol.votes import StepRecord
from elastic.protocol.wire import finite
from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.whole_weights import sum_over_workers

METRICS = frozenset(
    [
        "device_mfu",
        "device_tflops",
        "eval_loss",
        "evaluations_not_finite",
        "goodput",
        "paused_s",
        "recovery_s",
        "redone_s",
        "samples_per_s",
        "samples_per_s_per_device",
        "steps_skipped",
        "waiting_s",
        "worker_hours",
        "workers_joined",
        "workers_lost",
    ]
)
"""Metrics of the run besides the fields of its records; see `pipelines.observe.tracking.rows`."""
RESERVED = METRICS | {field.name for field in fields(StepRecord)}


class Reported:
    """One worker's reports of one step: for each name a weighted sum, and the sum of weights.

    Tensors stay on their device until `totals`.
    """

    def __init__(self) -> None:
        self._totals: dict[str, tuple[Any, Any]] = {}

    def add(self, name: str, value: Any, weight: float) -> None:
        """Add a number with a weight, or a pair (sum, count). Raises `LoopMisused`."""
        if name in RESERVED:
            raise LoopMisused(f"step.report({name}=...): the run logs {name}; use another name")
        if not name.isidentifier():
            raise LoopMisused(f"step.report: {name!r} is not a name; use letters, digits and _")
        parts = value if isinstance(value, tuple | list) and len(value) == 2 else (value,)
        if any(isinstance(part, DTensor) for part in parts):
            raise LoopMisused(
                f"step.report({name}=...): a part of a sharded tensor; report what the model "
                "returns"
            )
        if not all(map(_is_number, parts)):
            raise LoopMisused(
                f"step.report({name}={_described(value)}): pass one number, or a pair (sum, "
                "count) of which the run logs the quotient"
            )
        total, count = (_detached(part) for part in (parts if len(parts) == 2 else (*parts, 1)))
        if weight and len(parts) == 1:
            total, count = total * weight, weight
        known_total, known_count = self._totals.get(name, (0.0, 0.0))
        if weight:  # samples that pad a step do not count
            known_total, known_count = known_total + total, known_count + count
        self._totals[name] = known_total, known_count

    def totals(self) -> dict[str, tuple[float, float]]:
        """The sums on the host."""
        return {name: (float(total), float(count)) for name, (total, count) in self._totals.items()}


class ReportSums:
    """The sums of all workers' reports in one generation; every worker has the same names."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sums: list[float] = []

    def __len__(self) -> int:
        return 2 * len(self._names)

    def lacks(self, own: Mapping[str, tuple[float, float]]) -> bool:
        """Whether a name is not agreed on yet."""
        return not own.keys() <= set(self._names)

    def packed(self, own: Mapping[str, tuple[float, float]]) -> list[float]:
        """This worker's numbers for a sum over all workers."""
        return [number for name in self._names for number in own.get(name, (0.0, 0.0))]

    def add(self, summed: Sequence[float]) -> None:
        """Add what all workers have contributed to one sum."""
        self._sums = [a + b for a, b in zip(self._sums, summed, strict=True)]

    def means(self) -> dict[str, float | None]:
        """The weighted means, and from now on sums of the next step; without names that no worker
        has reported."""
        pairs = zip(self._names, self._sums[::2], self._sums[1::2], strict=True)
        means = {name: finite(total / count) for name, total, count in pairs if count}
        self._sums = [0.0] * len(self)
        return means

    def agree(
        self, own: Mapping[str, tuple[float, float]], groups: Groups, interrupt: Interrupt
    ) -> None:
        """Learn the names of all workers. All of them call it."""
        text = json.dumps(sorted(own)).encode()
        lengths = _gathered([len(text)], groups)
        interrupt()
        width = max(length for [length] in lengths)
        rows = _gathered([*text, *[0] * (width - len(text))], groups)
        interrupt()  # an aborted reduction may have returned garbage
        names = set(self._names)
        for row, [length] in zip(rows, lengths, strict=True):
            names.update(json.loads(bytes(row[:length])))
        sums = zip(self._sums[::2], self._sums[1::2], strict=True)
        known = dict(zip(self._names, sums, strict=True))
        self._names = sorted(names)
        self._sums = self.packed(known)


def means_of_all(
    own: Mapping[str, tuple[float, float]], groups: Groups, interrupt: Interrupt
) -> dict[str, float | None]:
    """The weighted means of what all workers have reported. All of them call it."""
    sums = ReportSums()
    sums.agree(own, groups, interrupt)
    if len(sums):
        sums.add(sum_over_workers(sums.packed(own), groups))
        interrupt()
    return sums.means()


def _gathered(row: list[int], groups: Groups) -> list[list[int]]:
    """Rows of the same length from all workers."""
    num_workers = groups.layout.num_workers
    rows = torch.zeros(num_workers, len(row), dtype=torch.int32, device=groups.device)
    rows[groups.world_rank] = torch.tensor(row, dtype=torch.int32)
    wait_for(groups.world.allreduce([rows]))
    gathered: list[list[int]] = rows.tolist()
    return gathered


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) or (isinstance(value, Tensor) and value.numel() == 1)


def _detached(value: Any) -> Any:
    return value.detach().double().reshape(()) if isinstance(value, Tensor) else float(value)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor of shape {tuple(value.shape)}"
    return type(value).__name__
