"""Which kind of failure an exception in a worker is: its text counts before its type.

NCCL reports a broken device of its own machine as a `DistBackendError`, which is also what a lost
peer looks like. Only the text tells them apart: `unhandled cuda error` is local, `remote process
exited` is not.
"""

from __future__ import annotations

import re
import sys
from traceback import walk_tb

import torch
import torch.distributed as dist

from actors.storage.errors import BrokenDevice, UnfitMachine, WrongHolding
from elastic.protocol.votes import BrokenVote

MEMORY = re.compile(
    r"DefaultCPUAllocator: can't allocate"
    r"|(?:CUDA|HIP|Cuda failure|hip failure)[^\n]{0,40}out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED"
)
"""In the text also of a mere RuntimeError, as torch reports a lack of host memory."""
DEVICE = re.compile(
    r"(?:CUDA|HIP)(?: driver)? error|unhandled (?:cuda|hip) error|(?:Cuda|hip|HIP) failure"
    r"|uncorrectable ECC|device-side assert|illegal memory access|unspecified launch failure"
    r"|\bXid\b|fallen off the bus"
    r"|C(?:UBLAS|UDNN)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)"
)
MISTAKE = re.compile(
    r"CUBLAS_STATUS_(?:INVALID_VALUE|NOT_SUPPORTED)|CUDA error: invalid configuration argument"
)
"""What a device refuses because of how it was called; it still works."""
PEER = re.compile(r"gloo|Connection closed by peer|NCCL|nccl|Timed out waiting|TCPStore")
OURS = ("torch", "actors", "elastic", "pipelines")
"""The packages whose connections are those to peers."""
WANTED = re.compile(r"(?:[Tt]ried|[Uu]nable) to allocate ([\d.]+) ([Bb]ytes|[KMGT]i?B)")


def kind_of(error: BaseException) -> str:
    """`holding`, `machine`, `memory`, `device`, `peer` or `program`; see `WorkerRaised`."""
    text = _text_of(error)
    if isinstance(error, WrongHolding):
        return "holding"
    if isinstance(error, UnfitMachine):
        return "machine"
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or MEMORY.search(text):
        return "memory"
    if MISTAKE.search(text):
        return "program"
    if isinstance(error, BrokenDevice) or DEVICE.search(text):
        return "device"
    if isinstance(error, ConnectionError | TimeoutError) and _is_raised_here(error):
        return "peer"
    errors = [error, *_causes_of(error)]
    return "peer" if any(map(_is_broken_collective, errors)) else "program"


def wanted_of(error: BaseException) -> int:
    """How many bytes an allocator says that it could not get; 0 if it does not say."""
    found = WANTED.search(str(error))
    if found is None:
        return 0
    power = "BKMGT".index(found[2][0].upper())
    return int(float(found[1]) * 1024**power)


def _text_of(error: BaseException) -> str:
    """With that of the exceptions that it was raised from."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < 8:
        texts.append(str(cause))
        cause = cause.__cause__
    return "\n".join(texts)


def _is_broken_collective(error: BaseException) -> bool:
    is_marked = isinstance(error, RuntimeError) and PEER.search(_text_of(error)) is not None
    return isinstance(error, BrokenVote | dist.DistError) or (is_marked and _is_raised_here(error))


def _is_raised_here(error: BaseException) -> bool:
    """Whether torch or this project has raised it, not the user's code or a library of theirs: a
    feature store that times out is no lost peer. The standard library raises for its caller."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    packages = [name.partition(".")[0] for name in frames]
    callers = [name for name in packages if name not in sys.stdlib_module_names]
    return not callers or callers[-1] in OURS


def _causes_of(error: BaseException) -> list[BaseException]:
    """What it was raised from, or while handling, the nearest first: the user's code may wrap what
    a collective raises."""
    causes: list[BaseException] = []
    cause = error.__cause__ or error.__context__
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return causes
