"""Statistics of a step by block: norms of gradients, parameters and updates, and activations.

Each rank sums over its shards and microbatches. One small all-reduce after the step gives the
statistics of the full model and batch, equal under any layout up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from actors.distributed.stall import wait_for
from actors.runtime.program import Groups
from pipelines.settings import TrainSettings
from pipelines.training.replica.local_state import LocalState
from pipelines.training.sharding.sharded import local_tensor
from pipelines.training.workload.state import build_on_meta
from pipelines.training.workload.workload import Workload

GRADIENT, PARAMETER, UPDATE, SUM, SQUARES, COUNT, ZEROS, NONFINITE = range(8)
"""The columns of sums of a group: three squared norms, then sums over its block's outputs."""

StatisticsReport = dict[str, dict[str, float | None]]
"""The statistics of each group by name; None for an absent or non-finite value."""


class Statistics:
    """Collects statistics on one rank, every `statistics_every` steps.

    The groups are the workload's blocks and, outside of blocks, the module's children.
    """

    def __init__(
        self, workload: Workload, settings: TrainSettings, groups: Groups, state: LocalState
    ) -> None:
        self._every = settings.statistics_every
        self._groups, self._state = groups, state
        self._due = 0
        """The step for which statistics are collected; 0 for none."""
        if not self._every:
            return
        self.names = group_names(build_on_meta(workload, settings), workload)
        modules = state.sharded.modules
        for module in modules:
            block_ids = {id(block) for block in workload.blocks(module)}
            for name, part in module.named_modules():
                if id(part) in block_ids:
                    part.register_forward_hook(_Hook(self, self.names.index(name)))

    def begin(self, step: int, rounds: Sequence[tuple[int, ...]]) -> None:
        """Start to collect if the step is due; `rounds` are the microbatches of its passes."""
        self._due = step if self._every and step % self._every == 0 else 0
        if self._due:
            shape, device = (len(self.names), NONFINITE + 1), self._groups.device
            self._sums = torch.zeros(shape, dtype=torch.float64, device=device)
            self._rounds = list(rounds)
            self._num_seen = [0] * len(self.names)
            self._is_forward = True

    def note_gradients(self) -> None:
        """Add the reduced gradients, after the step's passes."""
        if self._due:
            self._is_forward = False
            self._add(GRADIENT, self._state.gradients())

    def before_step(self) -> None:
        """Copy the parameters that the optimizer is about to change."""
        if self._due:
            self._before = {name: shard.clone() for name, shard in self._state.shards.items()}

    def after_step(self, num_tokens: int) -> None:
        """Add parameters and updates, after the optimizer's step or a skipped step."""
        if not self._due:
            return
        self._num_tokens = num_tokens
        shards, before = self._state.shards, self._before
        self._add(PARAMETER, shards)
        self._add(UPDATE, {name: shard - before[name] for name, shard in shards.items()})
        del self._before

    def report(self) -> StatisticsReport | None:
        """The statistics of the full model for the last step, equal on all ranks; None if it was
        not due. It runs one collective."""
        if not self._due:
            return None
        self._due = 0
        wait_for(self._groups.world.allreduce([self._sums]))
        rows = zip(self.names, self._sums.tolist(), strict=True)
        return {name: _row_report(row, self._num_tokens) for name, row in rows}

    def _add_output(self, group: int, output: Any) -> None:
        """Add the output of a block's forward; schedules run microbatches in order."""
        if not self._due or not self._is_forward:
            return
        number = self._num_seen[group]
        self._num_seen[group] += 1
        first = output[0] if isinstance(output, tuple | list) else output
        if number >= len(self._rounds) or not self._rounds[number]:
            return
        if not isinstance(first, Tensor) or not first.is_floating_point():
            return
        values = local_tensor(first.detach())
        is_finite = torch.isfinite(values)
        finite = torch.where(is_finite, values, 0)
        squares = finite.to(torch.promote_types(finite.dtype, torch.float32)).square()
        terms = [finite, squares, torch.ones_like(is_finite), values == 0, ~is_finite]
        self._sums[group, SUM:] += torch.stack([term.sum(dtype=torch.float64) for term in terms])

    def _add(self, column: int, tensors: Mapping[str, Tensor]) -> None:
        if tensors:
            names = list(tensors)
            groups = torch.tensor([group_of(self.names, name) for name in names])
            squares = self._state.squared_norms(tensors).to(self._sums.device)
            self._sums[:, column].index_add_(0, groups.to(squares.device), squares)


class _Hook:
    """The forward hook of a block."""

    def __init__(self, statistics: Statistics, group: int) -> None:
        self._statistics, self._group = statistics, group

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._statistics._add_output(self._group, output)


def group_names(module: nn.Module, workload: Workload) -> list[str]:
    """The names of the blocks, then of the children with parameters outside of blocks."""
    blocks = {id(block) for block in workload.blocks(module)}
    names = [name for name, part in module.named_modules() if id(part) in blocks]
    owners = (name for name, _ in module.named_parameters())
    others = (name.partition(".")[0] for name in owners if group_of(names, name) is None)
    return list(dict.fromkeys([*names, *others]))


def group_of(names: Sequence[str], parameter: str) -> int | None:
    """The group of a parameter: the longest group name that is a prefix of its name."""
    prefixes = [name for name in names if parameter == name or parameter.startswith(f"{name}.")]
    return names.index(max(prefixes, key=len)) if prefixes else None


def _row_report(row: Sequence[float], num_tokens: int) -> dict[str, float | None]:
    count = row[COUNT]
    parameter, update = _root(row[PARAMETER]), _root(row[UPDATE])
    numbers = {
        "grad_norm": _root(row[GRADIENT], num_tokens),
        "param_norm": parameter,
        "update_norm": update,
        "update_ratio": update / parameter if parameter and update is not None else None,
    }
    if count:
        numbers |= {
            "activation_mean": _finite(row[SUM] / count),
            "activation_rms": _root(row[SQUARES] / count),
            "activation_zeros": row[ZEROS] / count,
            "activation_nonfinite": row[NONFINITE] / count,
        }
    return numbers


def _root(square: float, divisor: int = 1) -> float | None:
    return _finite(math.sqrt(square) / divisor) if divisor and square >= 0 else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
