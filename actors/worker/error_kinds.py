"""Classification of worker exceptions: by text first, by type second.

NCCL raises a `DistBackendError` both for a broken local device and for a lost peer. Only the text
distinguishes them: `unhandled cuda error` is local, `remote process exited` is not.
"""

from __future__ import annotations

import re
import sys
from traceback import walk_tb

import torch
import torch.distributed as dist

from actors.storage.errors import (
    BrokenDevice,
    ProgramRefused,
    StepMismatch,
    UnhealthyMachine,
    UnsuitableMachine,
)
from elastic.protocol.votes import BrokenVote

MEMORY = re.compile(
    r"DefaultCPUAllocator: can't allocate"
    r"|(?:CUDA|HIP|Cuda failure|hip failure)[^\n]{0,40}out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED"
)
"""Out of memory. torch reports a lack of host memory as a plain RuntimeError with such a text."""
DEVICE = re.compile(
    r"(?:CUDA|HIP)(?: driver)? error|unhandled (?:cuda|hip) error|(?:Cuda|hip|HIP) failure"
    r"|uncorrectable ECC|device-side assert|illegal memory access|unspecified launch failure"
    r"|\bXid\b|fallen off the bus"
    r"|C(?:UBLAS|UDNN)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)"
)
MISTAKE = re.compile(
    r"CUBLAS_STATUS_(?:INVALID_VALUE|NOT_SUPPORTED)|CUDA error: invalid configuration argument"
)
"""A wrong call that a working device refuses."""
PEER = re.compile(r"gloo|Connection closed by peer|NCCL|nccl|Timed out waiting|TCPStore")
OURS = ("torch", "actors", "elastic", "pipelines")
"""The packages whose connections lead to peers."""
WANTED = re.compile(r"(?:[Tt]ried|[Uu]nable) to allocate ([\d.]+) ([Bb]ytes|[KMGT]i?B)")


def kind_of(error: BaseException, has_abandoned_thread: bool = False) -> str:
    """The kind of the failure: `holding`, `machine`, `health`, `mistake`, `memory`, `device`,
    `peer` or `program`; see `WorkerRaised`.

    An abandoned thread holds memory until it ends, so a lack of it says nothing about the layout:
    it counts as a broken device, and a new process replaces this one.
    """
    text = _text_of(error)
    if isinstance(error, StepMismatch):
        return "holding"
    if isinstance(error, UnhealthyMachine):
        return "health"
    if isinstance(error, UnsuitableMachine):
        return "machine"
    if isinstance(error, ProgramRefused):
        return "mistake"
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or MEMORY.search(text):
        return "device" if has_abandoned_thread else "memory"
    if MISTAKE.search(text):
        return "program"
    if isinstance(error, BrokenDevice) or DEVICE.search(text):
        return "device"
    if isinstance(error, ConnectionError | TimeoutError) and _is_raised_here(error):
        return "peer"
    errors = [error, *_causes_of(error)]
    return "peer" if any(map(_is_broken_collective, errors)) else "program"


def wanted_of(error: BaseException) -> int:
    """The number of bytes that the allocator could not get; 0 if its message does not say."""
    match = WANTED.search(str(error))
    if match is None:
        return 0
    power = "BKMGT".index(match[2][0].upper())
    return int(float(match[1]) * 1024**power)


def _text_of(error: BaseException) -> str:
    """The texts of an exception and of the exceptions from which it was raised."""
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
    """Whether torch or this project raised the error, rather than the user's code or its libraries:
    a feature store that times out is no lost peer. An error of the standard library counts as its
    caller's."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    packages = [name.partition(".")[0] for name in frames]
    callers = [name for name in packages if name not in sys.stdlib_module_names]
    return not callers or callers[-1] in OURS


def _causes_of(error: BaseException) -> list[BaseException]:
    """The exceptions from which, or while handling which, an error was raised, nearest first: the
    user's code may wrap the error of a collective."""
    causes: list[BaseException] = []
    cause = error.__cause__ or error.__context__
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return causes
