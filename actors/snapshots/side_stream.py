"""Copying from a GPU on a side stream while it computes; on a CPU, plain copying."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from elastic.geometry.tensor_specs import TensorSpec


def clone_buffers(specs: Sequence[TensorSpec], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the state, by name, that can be copied while the next step computes.

    A forward pass may change buffers, and nothing else: so buffers are cloned here.
    """
    buffers = {spec.name for spec in specs if spec.kind == "buffer"}
    return {n: t.detach().clone() if n in buffers else t for n, t in tensors.items()}


class SideStream:
    """A stream for copies. It is created when the tensors have the values to be copied, and may be
    used in any thread."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        self._stream = torch.cuda.Stream(device) if device else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies issued inside are complete when the context ends."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
