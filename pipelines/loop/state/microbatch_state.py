"""Tensors that each microbatch of a step passes on to the same one of the next step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from actors.distributed.stall import wait_for
from actors.runtime.program import Groups, Interrupt
from pipelines.loop.state.errors import LoopMisused
from pipelines.reading.endless import InSequence
from pipelines.reading.sampler_order import InSamplerOrder
from pipelines.reading.stream import is_stream
from pipelines.settings.recipe import Dataset


class MicrobatchStates:
    """What a script declares by `run.state`.

    Each worker has the tensors of all microbatches of a step, shape (microbatches, *shape of one).
    In a step it sets those of its own; all are gathered before the vote. So they are one copy of
    the run's state, as the objects of `run.keep`, with any number of workers.
    """

    def __init__(self) -> None:
        self.states: list[CarriedTensor] = []

    def add(self, first: Tensor) -> CarriedTensor:
        """Raises `LoopMisused` for what is no plain tensor."""
        if not isinstance(first, Tensor) or isinstance(first, DTensor):
            raise LoopMisused(
                f"run.state: got {type(first).__name__}; pass the tensor with which each "
                "microbatch begins at the first step"
            )
        self.states.append(state := CarriedTensor(first))
        return state

    def begin(self, num_microbatches: int) -> list[Tensor]:
        """Make the tensors of all microbatches, and return them."""
        for state in self.states:
            shape = (num_microbatches, *state.first.shape)
            state.rows = state.first.expand(shape).clone(memory_format=torch.contiguous_format)
        return [state.rows for state in self.states]

    def refuse_other_order(self, dataset: Dataset) -> None:
        """Raise `LoopMisused` for a shuffled dataset, in which no microbatch continues another."""
        in_order = isinstance(dataset, InSequence | InSamplerOrder) or is_stream(dataset)
        if self.states and not in_order:
            raise LoopMisused(
                "run.state: the samples are shuffled, so that a microbatch does not continue that "
                "of the step before: give the loader shuffle=False, or an IterableDataset"
            )

    def refuse_other_number(self, num_microbatches: int) -> None:
        """Raise `LoopMisused` if the settings have replaced what `run.steps` has declared."""
        for state in self.states:
            if len(state.rows) != num_microbatches:
                raise LoopMisused(
                    f"run.state: the script declares {len(state.rows)} microbatches a step, but "
                    f"the settings make {num_microbatches}: set microbatches in run.steps and "
                    "batch_size in the loader, not batch and microbatch"
                )

    def begin_step(self) -> None:
        for state in self.states:
            state.own.clear()
            state.leave()

    def end_step(self) -> None:
        for state in self.states:
            state.leave()

    def begin_microbatch(
        self, number: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Begin microbatch `number` of the step; None: a padding one, which sets nothing."""
        for state in self.states:
            state.begin_microbatch(number, dtype, device)

    def gather(self, groups: Groups, counts: bool, interrupt: Interrupt) -> None:
        """Gather what all workers have set in this step, by one collective, for `commit`.

        The sum of bytes of which one worker at most has others than 0 is exact for any dtype. Of
        workers that compute the same microbatches only one `counts`.
        """
        if not self.states:
            return
        for state in self.states if not counts else ():
            state.own.clear()
        packed = [part for state in self.states for part in state.packed()]
        total = torch.cat(packed).to(groups.device)
        wait_for(groups.world.allreduce([total]))
        interrupt()  # an aborted reduction may have returned garbage
        parts = iter(total.cpu().split([len(part) for part in packed]))
        for state in self.states:
            state.take(next(parts), next(parts))

    def commit(self) -> None:
        """Let what was gathered be in effect from the next step on."""
        for state in self.states:
            state.commit()


class CarriedTensor:
    """One tensor of each microbatch; in `step.batches()` its `value` is that of the present one."""

    def __init__(self, first: Tensor) -> None:
        self.first = first.detach()
        """At the first step."""
        self.rows: Tensor
        """Of all microbatches, at the beginning of the present step."""
        self.own: dict[int, Tensor] = {}
        """What this worker has set in the present step."""
        self._gathered: tuple[Tensor, Tensor] | None = None
        """What all workers have set: the numbers of the microbatches, and their rows."""
        self._number: int | None = None
        self._is_padding = False
        self._dtype, self._device = first.dtype, first.device

    @property
    def value(self) -> Tensor:
        """What the same microbatch has set in the step before, at first the tensor declared; in
        the run's dtype and on its device, without a gradient.

        What is set is in effect from the next step on, if this one commits. It has the shape of
        the first tensor. Raises `LoopMisused` outside of `step.batches()`.
        """
        value = self.rows[self._present()]
        dtype = self._dtype if value.is_floating_point() else value.dtype
        return value.to(self._device, dtype, copy=True)

    @value.setter
    def value(self, value: Tensor) -> None:
        number = self._present()
        if not isinstance(value, Tensor) or value.shape != self.first.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise LoopMisused(
                f"run.state: set to a value of shape {shape}; it needs that of the first one, "
                f"{tuple(self.first.shape)}, which is of one microbatch"
            )
        if not self._is_padding:
            self.own[number] = value.detach().to(self.rows.device, self.rows.dtype, copy=True)

    def begin_microbatch(
        self, number: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._is_padding = number is None
        self._number = (self._number or 0) if number is None else number % len(self.rows)
        self._dtype, self._device = dtype, device

    def leave(self) -> None:
        """No microbatch is open any more."""
        self._number = None

    def packed(self) -> Sequence[Tensor]:
        """Which microbatches this worker has set, and their bytes; 0 for the others'."""
        is_own = torch.zeros(len(self.rows), dtype=torch.uint8)
        rows = torch.zeros(self.rows.shape, dtype=self.rows.dtype)
        for number, value in self.own.items():
            is_own[number] = 1
            rows[number] = value
        return is_own, rows.view(-1).view(torch.uint8)

    @torch.no_grad()
    def take(self, is_set: Tensor, content: Tensor) -> None:
        """Note the microbatches that some worker has set, for `commit`."""
        rows = content.clone().view(self.rows.dtype).view(self.rows.shape)
        chosen = is_set.bool().nonzero().flatten()
        device = self.rows.device
        self._gathered = chosen.to(device), rows[chosen].to(device)

    @torch.no_grad()
    def commit(self) -> None:
        if self._gathered is not None:
            chosen, rows = self._gathered
            self.rows[chosen] = rows
            self._gathered = None

    def _present(self) -> int:
        if self._number is None:
            raise LoopMisused(
                "run.state: `value` is that of a microbatch: use it in `for ... in step.batches()`"
            )
        return self._number
