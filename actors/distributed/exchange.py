"""How a worker exchanges the windows of a reshard with its peers.

On Gloo it goes by steps: in the steps of shift s a worker sends to the s-th worker after it and
receives from the s-th before it, one window each way. All workers take the steps in this order. So
no cyclic wait can arise, and few windows are packed at a time, however many peers there are.
Windows that need no packing are sent from the beginning.

On NCCL it goes by rounds: each is one operation with all peers at once. Both sides of a pair assign
the same windows to a round, so no round waits for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from actors.distributed.backends.torch_groups_private import PeerMessage, exchange_all
from actors.distributed.stall import wait_for
from actors.distributed.transfer_windows import LARGEST_BYTES, TransferWindow, Windows
from actors.host_memory.host_copy import copy_tensors

AHEAD = 32
"""How many steps with packed windows are under way at once on Gloo, each with at most one buffer of
`LARGEST_BYTES` each way. With a quarter as many, a packed exchange on two cores took 1.07 times as
long; windows of half or a quarter of the size took 1.1 and 1.25 times as long (docs/facts.md)."""

TransferStep = tuple[list[TransferWindow], list[TransferWindow]]
"""The outgoing and the incoming windows of one step or round."""


@dataclass
class Moved:
    """Bytes moved, counted where the transfers are issued."""

    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_copied: int = 0


@dataclass(frozen=True)
class Transport:
    """What an exchange uses; `check` may raise whenever it is called, and ends the exchange."""

    group: ProcessGroup
    device: torch.device
    moved: Moved
    check: Callable[[], None]

    def start(self, receives: list[PeerMessage], sends: list[PeerMessage]) -> list[Work]:
        self.moved.bytes_received += sum(message.tensor.nbytes for message in receives)
        self.moved.bytes_sent += sum(message.tensor.nbytes for message in sends)
        return exchange_all(self.group, self.device, receives, sends)


class Exchange(Protocol):
    """All messages of one worker in one reshard."""

    def __init__(self, transport: Transport) -> None: ...

    def begin(self, outgoing: Windows, incoming: Windows) -> None:
        """Start what can be started; local copies may follow."""

    def finish(self) -> None:
        """Exchange the rest, and wait until everything has arrived."""


class SteppedExchange:
    """The `Exchange` on Gloo."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._slots = deque(_Slot(transport, reuses=True) for _ in range(AHEAD))
        self._early = _Slot(transport, reuses=True)
        self._steps: list[TransferStep] = []

    def begin(self, outgoing: Windows, incoming: Windows) -> None:
        """Start all contiguous windows; the others are left to `finish`."""
        for step in _steps(self._transport.group, outgoing, incoming):
            self._early.begin(*([w for w in side if w.is_contiguous] for side in step))
            packed = [[w for w in side if not w.is_contiguous] for side in step]
            if any(packed):
                self._steps.append((packed[0], packed[1]))

    def finish(self) -> None:
        """Run the steps in order, several at once."""
        for step in self._steps:
            self._transport.check()
            self._slots[0].finish()
            self._slots[0].begin(*step)
            self._slots.rotate(-1)
        for slot in (*self._slots, self._early):
            self._transport.check()
            slot.finish()


class RoundExchange:
    """The `Exchange` on NCCL. The host only queues it: the GPU packs a round while the one before
    is under way."""

    round_bytes = 128 * 2**20
    """What a round sends to all peers together, and receives. Two rounds are under way at once, so
    a GPU needs at most four times as many bytes for packing, beside a window for each peer."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rounds: list[TransferStep] = []

    def begin(self, outgoing: Windows, incoming: Windows) -> None:
        share = max(1, self.round_bytes // self._transport.group.size())
        sends, receives = _by_round(outgoing, share), _by_round(incoming, share)
        numbers = range(1 + max([*sends, *receives], default=-1))
        self.rounds = [(sends.get(n, []), receives.get(n, [])) for n in numbers]

    def finish(self) -> None:
        before = None
        for sends, receives in self.rounds:
            self._transport.check()
            slot = _Slot(self._transport, reuses=False)
            slot.begin(sends, receives)
            if before is not None:
                before.finish()
            before = slot
        if before is not None:
            before.finish()
        if self._transport.device.type == "cuda":
            torch.cuda.synchronize(self._transport.device)


@dataclass
class _Slot:
    """Messages that are started and finished together.

    With `reuses` it has one buffer for each direction, and starts one packed window each way.
    """

    transport: Transport
    reuses: bool
    buffers: dict[str, Tensor] = field(default_factory=dict)
    works: list[Work] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)
    to_unpack: list[tuple[TransferWindow, Tensor]] = field(default_factory=list)

    def begin(self, outgoing: list[TransferWindow], incoming: list[TransferWindow]) -> None:
        sends = [PeerMessage(self._pack(window), window.peer, window.number) for window in outgoing]
        receives = [PeerMessage(self._target(w), w.peer, w.number) for w in incoming]
        self.sent += [message.tensor for message in sends]
        self.works += self.transport.start(receives, sends)

    def finish(self) -> None:
        """Wait for the transfers, and unpack the received windows."""
        for work in self.works:
            wait_for(work)
        for window, buffer in self.to_unpack:
            for part, packed in window.within(buffer):
                part.copy_(packed)
        self.works.clear()
        self.sent.clear()
        self.to_unpack.clear()

    def _pack(self, window: TransferWindow) -> Tensor:
        """A window's bytes on the group's device; staged parts are copied back to it."""
        is_there = window.parts[0].device.type == self.transport.device.type
        if window.is_contiguous and is_there:
            return _as_bytes(window.parts[0])
        buffer = self._buffer("outgoing", window)
        copy_tensors(list(window.within(buffer)))
        return buffer

    def _target(self, window: TransferWindow) -> Tensor:
        """The memory that receives a window: its only part if that is contiguous."""
        if window.is_contiguous:
            return _as_bytes(window.parts[0])
        buffer = self._buffer("incoming", window)
        self.to_unpack.append((window, buffer))
        return buffer

    def _buffer(self, direction: str, window: TransferWindow) -> Tensor:
        device = self.transport.device
        if not self.reuses:
            return torch.empty(window.num_bytes, dtype=torch.uint8, device=device)
        if direction not in self.buffers:
            num_bytes = LARGEST_BYTES[device.type]
            self.buffers[direction] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self.buffers[direction][: window.num_bytes]


def _steps(group: ProcessGroup, outgoing: Windows, incoming: Windows) -> Iterator[TransferStep]:
    """The windows that this worker sends and receives in each step: at most one each way."""
    me, num_peers = group.rank(), group.size()
    for shift in range(1, num_peers):
        after, before = (me + shift) % num_peers, (me - shift) % num_peers
        for pair in zip_longest(outgoing.get(after, ()), incoming.get(before, ())):
            sent, received = ([] if window is None else [window] for window in pair)
            yield sent, received


def _by_round(windows: Windows, share: int) -> dict[int, list[TransferWindow]]:
    """The windows of each round: `share` bytes for each peer, and the rest of a window."""
    rounds: dict[int, list[TransferWindow]] = {}
    for peer in sorted(windows):
        begin = 0
        for window in windows[peer]:
            rounds.setdefault(begin // share, []).append(window)
            begin += window.num_bytes
    return rounds


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
