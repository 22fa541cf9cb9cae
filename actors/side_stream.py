"""Copying out of a GPU beside what it computes; on a CPU it is plain copying."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


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
