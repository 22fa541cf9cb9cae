"""The program of a worker's reader host: it opens the dataset once, and forks the readers.

A fork of this process is cheap and safe: it has one thread, and none of the worker's sockets, which
must close when the worker dies. A reader shares the dataset's memory with the host.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from actors.distributed.torch_private import announce_reader
from pipelines.errors import DataUnreachable
from pipelines.reading.channel import Channel
from pipelines.reading.pass_reader import IDLE, PassReader, Request
from pipelines.settings.user_code import user_code_errors

PR_SET_PDEATHSIG = 1
PROGRESS_BYTES = 16


@dataclass(frozen=True)
class StartReaders:
    """The worker's first message."""

    reader: PassReader
    num_readers: int


@dataclass(frozen=True)
class ForkReader:
    """Request for a reader; its channel and its progress memory are sent along."""

    number: int


@dataclass(frozen=True)
class ReadFailed:
    """What went wrong, in one line; for a sample that raised, with the sample."""

    message: str
    sample: int = IDLE
    is_unreachable: bool = False
    """Whether another machine may be able to read it; see `DataUnreachable`."""


@dataclass(frozen=True)
class ReaderForked:
    number: int
    pid: int


@dataclass(frozen=True)
class ReaderEnded:
    """A reader has ended. `code` is its exit code, or minus the number of the signal."""

    pid: int
    code: int


class ReaderHost:
    """Forks readers on request, and reports those that have ended."""

    def __init__(self, channel: Channel, reader: PassReader, num_readers: int) -> None:
        self._channel = channel
        self._reader = reader
        self._num_readers = num_readers
        self._pids: set[int] = set()

    def run(self) -> None:
        """Serve the worker until it closes the connection or dies."""
        wake_up, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write_end)
        try:
            while True:
                ready, _, _ = select.select([self._channel.fileno(), wake_up], [], [])
                if wake_up in ready:
                    os.read(wake_up, 4096)
                    self._reap()
                if self._channel.fileno() in ready:
                    message = self._channel.receive()
                    self._fork(message.value.number, *message.fds)
        except (EOFError, ConnectionError):
            for pid in self._pids:
                os.kill(pid, signal.SIGKILL)

    def _fork(self, number: int, channel: int, progress: int) -> None:
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._channel.close()
            end_with_parent()
            own_end, noted = Channel.of(channel), ReadProgress(progress)
            serve(own_end, self._reader, number, self._num_readers, noted)
        os.close(channel)
        os.close(progress)
        self._pids.add(pid)
        self._channel.send(ReaderForked(number, pid))

    def _reap(self) -> None:
        while self._pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._pids.discard(pid)
            self._channel.send(ReaderEnded(pid, os.waitstatus_to_exitcode(status)))


class ReadProgress:
    """The sample that a reader reads now, in memory that the worker shares."""

    def __init__(self, memory: int) -> None:
        self._numbers = memoryview(mmap.mmap(memory, PROGRESS_BYTES)).cast("q")
        self.sample = IDLE

    def note(self, sample: int) -> None:
        """Note what is read from now on. Each number is stored at once, the time first: the worker
        never sees a new sample with an old time."""
        self.sample = sample
        self._numbers[1] = time.monotonic_ns()
        self._numbers[0] = sample

    def read(self) -> tuple[int, float]:
        """The sample, or `IDLE`, and for how long it has been read, in seconds."""
        sample, since_ns = self._numbers
        return sample, (time.monotonic_ns() - since_ns) * 1e-9


def serve(
    channel: Channel, reader: PassReader, number: int, num_readers: int, progress: ReadProgress
) -> NoReturn:
    """Answer the worker's requests in this process, until the worker closes the connection."""
    code = 0
    try:
        announce_reader(number, num_readers, reader.dataset)
        if reader.begin_process is not None:
            reader.begin_process(number)
        while True:
            channel.send(_answer(reader, channel.receive().value, progress))
    except (EOFError, ConnectionError):
        pass  # the worker needs no reader any more, or has died
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    os._exit(code)


def _answer(reader: PassReader, request: Request, progress: ReadProgress) -> Any:
    try:
        with user_code_errors("the dataset", is_all_theirs=True):
            return reader.read(request, progress.note)
    except Exception as error:
        return ReadFailed(str(error), progress.sample, isinstance(error, DataUnreachable))
    finally:
        progress.note(IDLE)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even if it hangs in a sample."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(fd: int) -> None:
    """Run a reader host whose channel to its worker is this file descriptor."""
    channel = Channel.of(fd)
    torch.set_num_threads(1)
    try:
        with user_code_errors("the recipe's data", is_all_theirs=True):
            start: StartReaders = channel.receive().value
            _ = start.reader.dataset
    except Exception as error:
        with suppress(EOFError, ConnectionError):
            is_unreachable = isinstance(error, DataUnreachable)
            channel.send(ReadFailed(str(error), is_unreachable=is_unreachable))
            while True:  # if it closed first, the worker might not receive the message
                channel.receive()
        return
    ReaderHost(channel, start.reader, start.num_readers).run()
