"""Copying out of a GPU beside what it computes; on a CPU it is plain copying."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from elastic.geometry.tensor_specs import TensorSpec


def held_still(specs: Sequence[TensorSpec], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the state, by name, as they may be copied while the next step computes.

    A pass forward may change buffers, and nothing else: those are copied here.
    """
    buffers = {spec.name for spec in specs if spec.kind == "buffer"}
    return {n: t.detach().clone() if n in buffers else t for n, t in tensors.items()}


class SideStream:
    """Made where the tensors are as they are to be copied, used in whatever thread."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        self._stream = torch.cuda.Stream(device) if device else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def copying(self) -> Iterator[None]:
        """What is copied herein is there at the end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
