"""A worker's reader processes: they read the passes of a plan ahead of the training thread."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from pipelines.errors import DataUnreachable, UserError
from pipelines.reading.channel import Channel
from pipelines.reading.pass_reader import IDLE, PassReader, Request, num_samples_of
from pipelines.reading.reader_host import (
    PROGRESS_BYTES,
    ForkReader,
    ReaderEnded,
    ReaderForked,
    ReadFailed,
    ReadProgress,
    StartReaders,
    main,
)
from pipelines.settings.settings import ReadingSettings

POLL_S = 0.05
"""How often a waiting training thread checks for an abort."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
MAX_DEATHS = 2
"""A sample, or a start of the host, fails at the second death. The first may have another cause."""


class Reader:
    """One reader process, as the worker sees it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pid: int | None = None
        self.requests: deque[Request] = deque()
        """The requests that it has not answered, in order."""
        self.channel, self.other_end = Channel.pair()
        memory = os.memfd_create("progress")
        os.ftruncate(memory, PROGRESS_BYTES)
        self.progress_memory = memory
        self.progress = ReadProgress(memory)
        self.progress.note(IDLE)


class Readers:
    """Reads the passes of a plan with several processes, within limits of number and bytes.

    Only the thread that trains calls it. A process that dies is replaced, and its requests are
    sent again.
    """

    def __init__(self, reader: PassReader, settings: ReadingSettings) -> None:
        """Start the processes. Raises `UserError` if the dataset cannot be sent to them."""
        self._settings = settings
        self._reader = reader
        self._plan: Iterator[Request] = iter(())
        self._again: deque[Request] = deque()
        """Requests of the plan that a dead reader has left."""
        self._wanted: set[Request] = set()
        """The requests of the plan that have been sent and not been taken."""
        self._batches: dict[Request, tuple[Any, int]] = {}
        """Batches that have not been taken, and their bytes."""
        self._bytes_per_sample = 0.0
        self._deaths: Counter[int] = Counter()
        self._num_failed_starts = 0
        """How often the host has ended since a reader last read something."""
        self._start()

    def follow(self, plan: Iterable[Request]) -> None:
        """Read what this plan says, in its order. What has been read for the former plan is kept if
        the new one has it soon, and dropped otherwise."""
        coming = iter(plan)
        num_ahead = self._settings.num_readers * self._settings.prefetch_factor
        first = list(islice(coming, num_ahead))
        known = set(self._batches) | {r for reader in self._readers for r in reader.requests}
        self._wanted = known & set(first)
        self._batches = {r: batch for r, batch in self._batches.items() if r in self._wanted}
        self._again = deque(request for request in first if request not in known)
        self._plan = coming
        self._send()

    def take(self, request: Request, interrupt: Callable[[], None]) -> Any:
        """The batch of a request; the plan's next passes are read meanwhile.

        It calls `interrupt`, which may raise, while it waits. Raises `UserError` for a sample that
        cannot be read.
        """
        if request not in self._batches:
            self._receive(0.0)
        if request not in self._batches and request not in self._wanted:
            if request in self._again:
                self._again.remove(request)
            self._again.appendleft(request)
        self._send(needed=request)
        while request not in self._batches:
            interrupt()
            self._receive(POLL_S)
            self._refuse_slow_sample()
            self._send(needed=request)
        batch, _ = self._batches.pop(request)
        self._wanted.discard(request)
        self._send()
        if isinstance(batch, ReadFailed):
            raise _error_of(batch)
        return batch

    def close(self) -> None:
        """End all processes."""
        self._host_channel.close()
        for reader in self._readers:
            reader.channel.close()
        self._host.wait()

    def _start(self) -> None:
        own, other = Channel.pair()
        program = f"from {main.__module__} import main; main({other.fileno()})"
        self._host = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=[other.fileno()],
            env={**ONE_THREAD, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            process_group=0,  # an interrupt from the terminal is for the program, not for readers
        )
        other.close()
        self._host_channel = own
        _send_dataset(own, StartReaders(self._reader, self._settings.num_readers))
        self._readers = [self._fork(number) for number in range(self._settings.num_readers)]
        self._watch()

    def _watch(self) -> None:
        """Note whom to hear: setting this up for each batch took longer than the batch."""
        self._poll = select.poll()
        self._poll.register(self._host_channel.fileno(), select.POLLIN)
        self._by_fd = {reader.channel.fileno(): reader for reader in self._readers}
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)

    def _fork(self, number: int) -> Reader:
        reader = Reader(number)
        fds = [reader.other_end.fileno(), reader.progress_memory]
        with suppress(ConnectionError):  # the host has ended: its channel shows it
            self._host_channel.send(ForkReader(number), fds)
        reader.other_end.close()
        os.close(reader.progress_memory)
        return reader

    def _send(self, needed: Request | None = None) -> None:
        """Send the next requests of the plan, each to the reader with the fewest, within the limits
        of number and bytes. The training thread waits for `needed`, which has no limit."""
        num_ahead = self._settings.num_readers * self._settings.prefetch_factor
        while True:
            if not self._again and (request := next(self._plan, None)) is not None:
                self._again.append(request)
            if not self._again:
                return
            request = self._again[0]
            is_allowed = len(self._wanted) < num_ahead and self._fits(request)
            if request != needed and self._wanted and not is_allowed:
                return
            self._again.popleft()
            self._wanted.add(request)
            reader = min(self._readers, key=lambda reader: len(reader.requests))
            reader.requests.append(request)
            with suppress(ConnectionError):  # it has ended: the host reports it
                reader.channel.send(request)

    def _fits(self, request: Request) -> bool:
        held = sum(num_bytes for _, num_bytes in self._batches.values())
        coming = sum(num_samples_of(r) for reader in self._readers for r in reader.requests)
        coming += num_samples_of(request)
        limit = self._settings.max_mib * 2**20
        return held + coming * self._bytes_per_sample <= limit

    def _receive(self, timeout_s: float) -> None:
        """Take in what has arrived; wait up to `timeout_s` for something."""
        ready = [fd for fd, _ in self._poll.poll(1000 * timeout_s)]
        for reader in [self._by_fd[fd] for fd in ready if fd in self._by_fd]:
            self._receive_from(reader)
        if self._host_channel.fileno() in ready:
            self._hear_host()  # last: it may replace a reader

    def _receive_from(self, reader: Reader) -> bool:
        """Take in the next batch of a reader; False if it has ended, which the host reports."""
        try:
            message = reader.channel.receive()
        except (EOFError, ConnectionError):
            return False
        self._num_failed_starts = 0
        request = reader.requests.popleft()
        per_sample = message.num_bytes / num_samples_of(request)
        self._bytes_per_sample = max(self._bytes_per_sample, per_sample)
        self._keep(request, message.value, message.num_bytes)
        return True

    def _keep(self, request: Request, batch: Any, num_bytes: int) -> None:
        if request in self._wanted:
            self._batches[request] = batch, num_bytes

    def _read_again(self, requests: Iterable[Request]) -> None:
        """Put the requests of a reader that has ended before the rest of the plan."""
        lost = [request for request in requests if request in self._wanted]
        self._wanted.difference_update(lost)
        self._again.extendleft(reversed(lost))

    def _hear_host(self) -> None:
        try:
            message = self._host_channel.receive().value
        except (EOFError, ConnectionError):
            self._restart()
            return
        match message:
            case ReaderForked(number, pid):
                self._readers[number].pid = pid
            case ReaderEnded(pid, code):
                ended = [reader for reader in self._readers if reader.pid == pid]
                for reader in ended:
                    self._replace(reader, _cause(code))
            case ReadFailed():
                raise _error_of(message)

    def _replace(self, reader: Reader, cause: str) -> None:
        """Replace a reader that has ended, and read its requests again, unless a sample has ended
        several readers."""
        while self._receive_from(reader):
            pass  # what it has answered before
        sample, _ = reader.progress.read()
        reader.channel.close()
        self._readers[reader.number] = self._fork(reader.number)
        self._watch()
        if sample != IDLE and reader.requests:
            self._deaths[sample] += 1
            if self._deaths[sample] >= MAX_DEATHS:
                text = f"the dataset: {MAX_DEATHS} reader processes ended with {cause} reading it"
                self._keep(reader.requests.popleft(), ReadFailed(text, sample), 0)
        self._read_again(reader.requests)
        print(f"elastic: reader {reader.number} ended with {cause}: replaced", flush=True)

    def _restart(self) -> None:
        """Start again after the death of the host, whose readers die with it."""
        code = self._host.wait()
        self._num_failed_starts += 1
        if self._num_failed_starts >= MAX_DEATHS:
            raise UserError(
                f"the reader host ended with {_cause(code)} {MAX_DEATHS} times before it read a "
                "sample: see the worker's output, or set reading.num_readers=0"
            )
        for reader in self._readers:
            reader.channel.close()
            self._read_again(reader.requests)
        self._host_channel.close()
        print(f"elastic: the reader host ended with {_cause(code)}: started again", flush=True)
        self._start()

    def _refuse_slow_sample(self) -> None:
        timeout_s = self._settings.sample_timeout_s
        for reader in self._readers:
            sample, seconds = reader.progress.read()
            if sample != IDLE and seconds > timeout_s:
                raise UserError(
                    f"sample {sample} of the dataset: reading takes longer than "
                    f"reading.sample_timeout_s={timeout_s:g}"
                )


def _send_dataset(host: Channel, start: StartReaders) -> None:
    try:
        host.send(start)
    except ConnectionError:
        return  # the host has ended: its channel shows it
    except Exception as error:
        raise UserError(
            f"the dataset cannot be sent to reader processes ({type(error).__name__}: {error}): "
            "open files and connections at the first read, or set reading.num_readers=0"
        ) from error


def _error_of(failed: ReadFailed) -> UserError:
    sample = "" if failed.sample == IDLE else f"sample {failed.sample} of "
    kind = DataUnreachable if failed.is_unreachable else UserError
    return kind(f"{sample}{failed.message}")


def _cause(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
