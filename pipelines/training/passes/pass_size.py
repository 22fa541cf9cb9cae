"""How many microbatches a rank merges into one pass, agreed upon by all ranks.

The first pass of a layout has one microbatch and is observed: the bytes that it keeps for backward,
and whether it draws random numbers. Every rank must run the same number of passes, because forward
and backward have collectives. So the ranks agree on the smallest size once in a generation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ReduceOp

from actors.distributed.stall import wait_for
from actors.distributed.torch_private import TorchDispatchMode
from actors.runtime.machine import free_bytes
from actors.runtime.program import Groups
from elastic.geometry.layout import Layout
from elastic.geometry.sample_order import num_rounds
from pipelines.errors import UserError
from pipelines.settings import TrainSettings
from pipelines.training.passes.wait_times import WaitTimes
from pipelines.training.sharding.recomputation import is_kept
from pipelines.training.sharding.sharded import local_tensor
from pipelines.training.workload.seeds import generator_states
from pipelines.training.workload.trees import tensors_in
from pipelines.training.workload.workload import Workload

MEMORY_SHARE = 1 / 3
"""The tensors that a pass keeps for backward may fill this share of the free memory. The rest is
for the gradients of activations, temporary tensors, and other processes."""
UNKNOWN = 0


@dataclass
class PassObservation:
    """What one pass of one microbatch showed."""

    kept_bytes: int
    """The bytes that forward kept for backward."""
    draws: bool
    """Whether it drew random numbers from the default generators."""
    updates_buffers: bool = False


@dataclass
class PassObservations:
    """What a process has observed of its passes, by layout; it outlives a generation."""

    by_layout: dict[Layout, PassObservation] = field(default_factory=dict)
    has_reported: bool = False
    """Whether the reason for single microbatches has been printed."""
    waits: WaitTimes = field(default_factory=WaitTimes)


class PassSize:
    """The number of microbatches in a pass of one rank under one assignment."""

    def __init__(
        self,
        workload: Workload,
        settings: TrainSettings,
        groups: Groups,
        observations: PassObservations,
    ) -> None:
        self._workload = workload
        self._settings = settings
        self._groups = groups
        self._observations = observations
        layout, shares = groups.assignment.layout, groups.assignment.shares
        self._key = replace(layout, dp=1)
        self.largest_share = most = num_rounds(
            settings.num_microbatches, layout.num_data_ranks, shares
        )
        """The most microbatches of a step that one rank has."""
        if settings.pass_samples != "auto":
            most = min(most, max(1, settings.pass_samples // settings.microbatch))
        self._most = most if layout.pp == 1 else 1
        self._agreed = 1 if self._most == 1 else UNKNOWN

    def agree(self) -> int:
        """The number of microbatches of a pass in this step: 1 until all ranks have an observation.

        It runs one small collective in the first steps of a generation.
        """
        if self._agreed == UNKNOWN:
            own = torch.tensor([self._own_limit()], device=self._groups.device)
            wait_for(self._groups.world.allreduce([own], ReduceOp.MIN))
            self._agreed = int(own)
            if self._agreed == 1:
                self._report()
        return max(1, self._agreed)

    def watched(self, module: nn.Module) -> AbstractContextManager[None]:
        """Watch a forward pass: observe it if that is due, and refuse random draws in merged ones.

        Raises `UserError` for a merged pass that draws.
        """
        if self._agreed == UNKNOWN and self._key not in self._observations.by_layout:
            return self._observing(module)
        return self._refusing_draws() if self._agreed > 1 else nullcontext()

    @contextmanager
    def _observing(self, module: nn.Module) -> Iterator[None]:
        kept = KeptForBackward(module)
        # Selective checkpointing keeps results where the hooks of autograd do not see them.
        is_selective = self._settings.activation_checkpointing == "selective"
        results = KeptResults(kept) if is_selective else nullcontext()
        states = generator_states(self._groups.device)
        with kept, results:
            yield
        draws = states != generator_states(self._groups.device)
        self._observations.by_layout[self._key] = PassObservation(kept.num_bytes, draws)

    @contextmanager
    def _refusing_draws(self) -> Iterator[None]:
        state = torch.get_rng_state()
        yield
        if not torch.equal(state, torch.get_rng_state()):
            raise UserError(
                "a pass draws random numbers, which the first pass of this worker did not do: set "
                f"pass_samples={self._settings.microbatch}, so that its result does not depend on "
                "the number of workers"
            )

    def note_updated_buffers(self) -> None:
        """Note that passes update buffers, as batch normalization does."""
        observation = self._observations.by_layout.get(self._key)
        if observation is not None:
            observation.updates_buffers = True

    def _own_limit(self) -> int:
        observation = self._observations.by_layout.get(self._key)
        if observation is None:
            return UNKNOWN
        if self._why_unmergeable(observation):
            return 1
        if self._settings.pass_samples != "auto":
            return self._most
        is_recomputed = self._settings.activation_checkpointing != "none"
        if is_recomputed and self._groups.device.type == "cpu":
            return 1  # recomputed activations are not among those kept
        budget = MEMORY_SHARE * free_bytes(self._groups.device)
        return max(1, min(self._most, int(budget / max(1, observation.kept_bytes))))

    def _why_unmergeable(self, observation: PassObservation) -> str | None:
        if observation.updates_buffers:
            return "a pass updates buffers, as batch normalization does"
        why_not = self._workload.why_unmergeable
        if observation.draws and not why_not and not self._may_divide_draws:
            return "a pass draws random numbers, as dropout does"
        return why_not

    @property
    def _may_divide_draws(self) -> bool:
        return self._workload.divides_draws and self._groups.layout.tp == 1

    def _report(self) -> None:
        """Print once why passes have one microbatch."""
        seen, observation = self._observations, self._observations.by_layout[self._key]
        reason = self._why_unmergeable(observation)
        if reason and not seen.has_reported and self._groups.world_rank == 0:
            print(f"elastic: each pass has one microbatch: {reason}", flush=True)
            seen.has_reported = True


class KeptForBackward(saved_tensors_hooks):
    """Counts the bytes that autograd keeps for backward, without those of parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._storages = {_address(parameter) for parameter in module.parameters()}
        self.num_bytes = 0
        super().__init__(self.count, _unchanged)

    def count(self, kept: Tensor) -> Tensor:
        address = _address(kept)
        if address not in self._storages:
            self._storages.add(address)
            self.num_bytes += local_tensor(kept).untyped_storage().nbytes()
        return kept


class KeptResults(TorchDispatchMode):
    """Counts the results that selective checkpointing keeps."""

    def __init__(self, kept: KeptForBackward) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        results = operator(*args, **(kwargs or {}))
        if is_kept(operator, args, kwargs):
            for result in tensors_in(results):
                self._kept.count(result)
        return results


def _address(tensor: Tensor) -> int:
    return local_tensor(tensor).untyped_storage().data_ptr()


def _unchanged(kept: Any) -> Any:
    return kept
