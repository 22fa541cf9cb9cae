"""What has been read of the present batch, for its later updates."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from pipelines.reading.pass_reader import Request
from pipelines.settings import TrainSettings


class BatchReads:
    """Reads each pass of a batch once, if several updates train on it."""

    def __init__(self, settings: TrainSettings) -> None:
        self._is_on = settings.updates_per_batch > 1
        self._most = settings.num_microbatches
        self._kept: dict[Request, Any] = {}

    def read(self, request: Request, read: Callable[[Request], Any]) -> Any:
        """What `read` returns; a copy, which the script may change, if it is kept for later."""
        if not self._is_on:
            return read(request)
        if request not in self._kept:
            while len(self._kept) >= self._most:  # those of the batch before
                self._kept.pop(next(iter(self._kept)))
            self._kept[request] = read(request)
        return deepcopy(self._kept[request])
