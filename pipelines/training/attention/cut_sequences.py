"""Context parallelism of custom modules: cut batches, and ring attention in place of torch's.

A recipe says which dim of which tensors of its batch is the sequence. Each `cp` rank gets its
positions of these, and the module's causal attention runs over the ranks. All else in the module
must treat each token by itself, and take positions from the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipelines.errors import UserError
from pipelines.training.attention.ring_attention import ring_attention
from pipelines.training.workload.drawing import ATTENTION
from pipelines.training.workload.parallel_groups import ParallelGroups
from pipelines.training.workload.ring import positions

SequenceDims = Mapping[str | int, int]
"""The dim that is the sequence, by the key of a tensor in the batch."""
COMPUTED_AGAIN = (
    "cp: the module is computed again in backward, as by checkpointing, or after it, where its "
    "attention would see only this rank's tokens: leave that out"
)
CausalAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
NUM_CP = 2
"""The ranks of the trial."""
TOLERANCE = 1e-4
NO_PAIR = (
    "cp: the recipe's losses and metrics must return pairs (sum, count) over tokens, as each rank "
    "has some"
)


def length_of(batch: Any, sequence: SequenceDims) -> int:
    """The length of a batch's sequences. Raises `UserError` if its tensors disagree."""
    lengths = {}
    for key, dim in sequence.items():
        try:
            lengths[key] = batch[key].shape[dim]
        except (KeyError, IndexError, TypeError, AttributeError):
            raise UserError(
                f"sequence: a batch of the recipe has no tensor {key!r} with a dim {dim}: give the "
                "dim of the sequence by the key in the batch"
            ) from None
    if len(set(lengths.values())) != 1:
        raise UserError(f"sequence: the lengths {lengths} of a batch differ: they must be equal")
    return int(next(iter(lengths.values())))


def cut_batch(batch: Any, sequence: SequenceDims, held: Tensor) -> Any:
    """The batch with these positions of each sequence."""

    def part(key: str | int, value: Any) -> Any:
        if key not in sequence:
            return value
        return value.index_select(sequence[key], held.to(value.device))

    if isinstance(batch, Mapping):
        return {key: part(key, value) for key, value in batch.items()}
    parts = [part(key, value) for key, value in enumerate(batch)]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def own_part(batch: Any, sequence: SequenceDims, parallel: ParallelGroups) -> tuple[Any, int]:
    """The batch with this rank's positions, and the length of the whole sequences."""
    length = length_of(batch, sequence)
    held = positions(length, parallel.cp_rank, parallel.num_cp)
    return cut_batch(batch, sequence, held), length


class AttentionReplaced(TorchFunctionMode):
    """Replaces causal `scaled_dot_product_attention`. Raises `UserError` for another attention."""

    def __init__(self, attend: CausalAttention) -> None:
        super().__init__()
        self._attend = attend

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is ATTENTION:
            return self._attended(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None or dropout_p or scale is not None or not is_causal:
            raise UserError(
                "cp: the ring computes scaled_dot_product_attention(q, k, v, is_causal=True) "
                "alone: no attn_mask, no dropout_p, no scale, and not without is_causal"
            )
        if query.dim() != 4 or key.shape != value.shape:
            raise UserError(
                f"cp: the ring needs queries, keys and values (batch, heads, length, size), not "
                f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
            )
        return self._attend(query, key, value)


def over_ring(length: int, parallel: ParallelGroups) -> AttentionReplaced:
    """Attention over sequences of `length` on the ranks of `cp`."""
    group = parallel.cp
    assert group is not None
    return AttentionReplaced(
        lambda query, key, value: ring_attention(
            query.contiguous(), key.contiguous(), value.contiguous(), length, group
        )
    )


class AttentionRefused(AttentionReplaced):
    """Refuses attention behind a forward pass, where it would see this rank's tokens alone."""

    def __init__(self) -> None:
        super().__init__(lambda query, key, value: query)

    def _attended(self, *inputs: Any, **keywords: Any) -> Tensor:
        raise UserError(COMPUTED_AGAIN)


class HalvesTrial:
    """Passes of whole sequences, and then of the parts of two ranks, whose losses must add up.

    Each rank attends to the keys and values of the whole pass.
    """

    num_passes = 1 + NUM_CP

    def __init__(self, batch: Any, sequence: SequenceDims) -> None:
        """Raises `UserError` if the tensors of the batch disagree."""
        self._batch, self._sequence = batch, sequence
        self._length = length_of(batch, sequence)
        self._attended: list[tuple[Tensor, Tensor]] = []

    def of_pass(self, number: int) -> tuple[AttentionReplaced, Any]:
        """The attention in a pass, and its batch."""
        if not number:
            return AttentionReplaced(self._attend_whole), self._batch
        held = positions(self._length, number - 1, NUM_CP)
        attend = partial(self._attend, held, iter(self._attended))
        return AttentionReplaced(attend), cut_batch(self._batch, self._sequence, held)

    def refuse(self, sums: Sequence[tuple[Tensor, Tensor]], advice: str) -> None:
        """Raise `UserError` unless the sums and counts of all passes agree."""
        whole, *parts = [[value.double() for value in pair] for pair in sums]
        totals = [sum(values, torch.zeros(()).double()) for values in zip(*parts, strict=True)]
        if not all(
            torch.allclose(total, expected, rtol=TOLERANCE)
            for total, expected in zip(totals, whole, strict=True)
        ):
            raise UserError(
                f"cp: two halves of the sequences have the loss and count {_numbers(totals)}, not "
                f"{_numbers(whole)} as whole ones: let the module take positions from the batch, "
                f"not from torch.arange, and {advice}"
            )

    def _attend_whole(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._attended.append((key.detach(), value.detach()))
        has_groups = query.shape[1] != key.shape[1]
        return ATTENTION(query, key, value, is_causal=True, enable_gqa=has_groups)

    def _attend(
        self,
        held: Tensor,
        calls: Iterator[tuple[Tensor, Tensor]],
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        keys, values = next(calls)
        visible = torch.arange(self._length) <= held[:, None]
        has_groups = query.shape[1] != keys.shape[1]
        return ATTENTION(query, keys, values, attn_mask=visible, enable_gqa=has_groups)


@torch.no_grad()
def refuse_other_sums(
    module: nn.Module, batch: Any, sequence: SequenceDims, loss: Callable[[nn.Module, Any], Any]
) -> None:
    """Try out a module of real values with cut sequences; see `HalvesTrial`. Raises `UserError`."""
    trial, sums = HalvesTrial(batch, sequence), []
    for number in range(trial.num_passes):
        attention, part = trial.of_pass(number)
        with attention:
            sums.append(_pair(loss(module, part)))
    trial.refuse(sums, "return the sum over tokens and their number")


def _pair(losses: Any) -> tuple[Tensor, Tensor]:
    match losses:
        case (Tensor() as total, count):
            return total.detach().reshape(()), torch.as_tensor(count).reshape(())
    raise UserError(NO_PAIR)


def _numbers(sums: Sequence[Tensor]) -> str:
    return ", ".join(f"{value.item():.6g}" for value in sums)
