"""Activation checkpointing: backward recomputes activations of a block (Chen et al., 2016)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from actors.distributed.torch_private import (
    FUSED_PRODUCTS,
    TorchDispatchMode,
    detached_in_mode,
    dropout_of,
    num_changes,
)
from pipelines.errors import UserError
from pipelines.settings.bounds import Recomputation
from pipelines.training.tensor.sharded_draws import drawing_again
from pipelines.training.workload.trees import mapped, tensors_in

KEPT_OPERATORS = frozenset(
    (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, *FUSED_PRODUCTS)
)
"""Operations whose results `selective` keeps: they take most of a block's time. Products of batches
of matrices are recomputed: as scores of an attention without a kernel they grow with the square of
the sequence (Korthikanti et al., Reducing Activation Recomputation, 2022)."""

Forward = Callable[..., Any]
Results = dict[Any, deque[tuple[Any, list[int]]]]
"""The kept results of each operation in the order of its calls, with the number of changes of each
tensor."""


def recomputed(forward: Forward, mode: Recomputation) -> Forward:
    """The same forward, whose activations backward recomputes."""
    if mode == "none":
        return forward
    options: dict[str, Any] = {"context_fn": _keeping_contexts} if mode == "selective" else {}

    def run(*args: Any, **kwargs: Any) -> Any:
        again = drawing_again(forward)
        return checkpoint(again, *args, use_reentrant=False, **options, **kwargs)

    return run


def _keeping_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """The contexts of a forward and of its recomputation.

    Those of `create_selective_checkpoint_contexts` (torch 2.13) require that both call the same
    operations. FSDP inside a block, around its experts, calls others.
    """
    results: Results = defaultdict(deque)
    return _KeepResults(results), _ReuseResults(results)


def is_kept(operator: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether the result of this call is kept. Attention with dropout is not: without its draws the
    recomputation would draw other numbers after it."""
    return operator in KEPT_OPERATORS and not dropout_of(operator, args, kwargs or {})


class _KeepResults(TorchDispatchMode):
    """Keeps the results of `KEPT_OPERATORS`."""

    def __init__(self, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        if is_kept(operator, args, kwargs):
            kept = mapped(detached_in_mode, result)
            self._results[operator].append((kept, _changes(kept)))
        return result


class _ReuseResults(TorchDispatchMode):
    """Returns the kept results instead of computing them, each once."""

    def __init__(self, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_kept(operator, args, kwargs):
            kept, changes = self._results[operator].popleft()
            if _changes(kept) != changes:
                raise UserError(
                    f"activation_checkpointing=selective: the module changes a result of "
                    f"{operator} in place, so backward cannot use it again: use `full`, or no "
                    "operation in place"
                )
            return kept
        return operator(*args, **(kwargs or {}))


def _changes(results: Any) -> list[int]:
    return [num_changes(tensor) for tensor in tensors_in(results)]
