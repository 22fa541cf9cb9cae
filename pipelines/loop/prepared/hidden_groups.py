"""The run's process groups, which a script does not see: for its code it is a single process.

Libraries ask for the default group to let rank 0 alone write files, as `save_pretrained` of
`transformers` does, or to sum over ranks. The first worker, on which the code below the loop runs,
need not be rank 0, and no other worker would answer a collective.
"""

from __future__ import annotations

import threading
from inspect import currentframe
from weakref import WeakSet

import torch.distributed

SEEING = {"torch", "actors", "elastic", "pipelines"}
"""The packages whose code sees the groups."""
_is_initialized = torch.distributed.is_initialized
_threads: WeakSet[threading.Thread] = WeakSet()


def hide_groups() -> None:
    """On the calling thread, let `torch.distributed.is_initialized()` be false for others' code."""
    _threads.add(threading.current_thread())
    torch.distributed.is_initialized = _is_seen


def _is_seen() -> bool:
    frame = currentframe()
    caller = frame.f_back if frame else None
    name = caller.f_globals.get("__name__", "") if caller else ""
    if name.partition(".")[0] not in SEEING and threading.current_thread() in _threads:
        return False
    return _is_initialized()
