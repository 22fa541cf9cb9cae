"""One worker's snapshots: copied to its keepers while the next step computes; runs without Ray.

A snapshot is begun after an apply and whole at all keepers before the next vote: whoever has read a
vote knows that the snapshot before it is whole everywhere.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from actors.keeper import PEER_TIMEOUT_S, address_of
from actors.messages import hear, receive_into, tell
from actors.room import NOT_WHOLE, NUM_VERSIONS, Room, Version
from elastic.assignment import Assignment
from elastic.commands import Protect
from elastic.keeping import Keeper
from elastic.relayout import Carried
from elastic.shards import region_of
from elastic.specs import TensorSpec

ALIGNED_BYTES = 64
LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Plan:
    """Where each tensor of a part lies in a snapshot: a function of the part alone."""

    places: tuple[tuple[str, int, tuple[int, ...], torch.dtype], ...]
    num_bytes: int

    @classmethod
    def of(cls, specs: Sequence[TensorSpec], assignment: Assignment, member: str) -> Plan:
        coordinates = assignment.coordinates(member)
        places, end = [], 0
        for spec in specs:
            region = region_of(spec, assignment.layout, coordinates)
            if region is not None:
                dtype = getattr(torch, spec.dtype)
                places.append((spec.name, end, region.shape, dtype))
                size = region.num_elements * spec.itemsize_bytes
                end += -(-size // ALIGNED_BYTES) * ALIGNED_BYTES
        return cls(tuple(places), end)

    def tensors(self, memory: memoryview) -> dict[str, Tensor]:
        """A part's tensors as they lie in the memory of a snapshot."""
        found = {}
        for name, begin, shape, dtype in self.places:
            count = prod(shape)
            flat = torch.empty(0, dtype=dtype)
            if count:
                flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=begin)
            found[name] = flat.view(shape)
        return found


@dataclass
class _Taking:
    """A snapshot under way."""

    step: int
    tensors: Mapping[str, Tensor]
    sink: _Sink
    ready: torch.cuda.Event | None
    copied: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    is_whole: bool = False
    error: Exception | None = None


class Snapshots:
    """Told where by the control thread, begun and awaited by the training thread."""

    def __init__(self, worker: str, node: str, specs: Sequence[TensorSpec], every: int) -> None:
        self._worker, self._node, self._specs, self._every = worker, node, specs, every
        self._buffers = {spec.name for spec in specs if spec.kind == "buffer"}
        self._order: Protect | None = None
        self._under_way: _Taking | None = None
        self._sink: _Sink | None = None
        self._takings: queue.Queue[_Taking] = queue.Queue()
        self._thread: threading.Thread | None = None

    def protect(self, order: Protect) -> None:
        """Take them to these keepers from the next boundary on; from any thread."""
        self._order = order

    @property
    def are_whole(self) -> bool:
        """Whether the newest that was due is whole at every keeper, or none is needed."""
        if self._order is None:
            return False
        return not self._keepers(self._order) or bool(self._under_way and self._under_way.is_whole)

    def take(self, step: int, assignment: Assignment, tensors: Mapping[str, Tensor]) -> None:
        """Begin one, if it is due or the first since the keepers were told."""
        order = self._order
        if order is None or order.generation != assignment.generation:
            return
        keepers, sink = self._keepers(order), self._sink
        is_first = sink is None or sink.order is not order
        if sink is None or is_first:
            plan = Plan.of(self._specs, assignment, self._worker)
            sink = self._sink = _Sink(order, self._worker, self._node, plan, keepers)
        if not keepers or not (is_first or step % self._every == 0):
            return
        # A pass forward may change buffers, and nothing else.
        fixed = {n: t.clone() if n in self._buffers else t for n, t in tensors.items()}
        ready = None
        if any(tensor.is_cuda for tensor in fixed.values()):
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="snapshots", daemon=True)
            self._thread.start()
        self._under_way = _Taking(step, fixed, sink, ready)
        self._takings.put(self._under_way)

    def await_whole(self, check: Callable[[], None]) -> None:
        """Before a vote; `check` may raise meanwhile. Raises what broke the copying."""
        taking = self._under_way
        while taking and not taking.done.wait(LOOK_EVERY_S):
            check()
        if taking and taking.error:
            raise taking.error

    def await_copied(self) -> None:
        """Before anything changes the tensors: they have been read."""
        if self._under_way:
            self._under_way.copied.wait()

    def end_generation(self) -> None:
        self.await_copied()
        self._order = self._under_way = self._sink = None

    def _keepers(self, order: Protect) -> tuple[Keeper, ...]:
        return order.keepers[order.workers.index(self._worker)]

    def _serve(self) -> None:
        while True:
            taking = self._takings.get()
            try:
                taking.is_whole = taking.sink.bring(taking)
            except Exception as error:
                taking.error = error  # raised where it is awaited
            finally:
                taking.copied.set()
                taking.done.set()


class _Sink:
    """The way to the keepers of one `Protect`; one that is gone gets nothing any more."""

    def __init__(
        self, order: Protect, worker: str, node: str, plan: Plan, keepers: tuple[Keeper, ...]
    ) -> None:
        self.order = order
        self._worker = worker
        self._plan = plan
        self._keepers = keepers
        self._is_beside = bool(keepers) and keepers[0].node == node
        self._others = keepers[1:] if self._is_beside else keepers
        self._socket: socket.socket | None = None
        self._room: Room | None = None

    def bring(self, taking: _Taking) -> bool:
        """Copy to host memory, that of the keeper beside if there is one, then to the others;
        whether it is whole at all of them."""
        try:
            room = self._room = self._room or self._make_room()
            version = room.oldest()
            self._copy(taking, version)
            taking.copied.set()
            whole = [self._pass_on(keeper, taking.step, version) for keeper in self._others]
            return all(whole) and self._is_there(taking.step)
        except OSError:
            return False  # the keeper beside is gone, which the controller learns by itself

    def _make_room(self) -> Room:
        if not self._is_beside:
            return Room.new(self._plan.num_bytes)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address_of(self._keepers[0].socket))
        tell(self._socket, do="room", **self._named(), num_bytes=self._plan.num_bytes)
        _, fds, *_ = socket.recv_fds(self._socket, 1, NUM_VERSIONS)
        if len(fds) < NUM_VERSIONS:
            raise ConnectionError("the keeper hung up")
        return Room(fds, self._plan.num_bytes)

    def _copy(self, taking: _Taking, version: Version) -> None:
        version.step = NOT_WHOLE
        places = self._plan.tensors(version.memory)
        if taking.ready is None:
            for name, place in places.items():
                place.copy_(taking.tensors[name].detach())
        else:
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(aside):
                aside.wait_event(taking.ready)
                for name, place in places.items():
                    place.copy_(taking.tensors[name].detach())
            aside.synchronize()
        version.step = taking.step

    def _pass_on(self, keeper: Keeper, step: int, version: Version) -> bool:
        """By the keeper beside, which has a core and a heap of its own, else from here."""
        if self._socket is not None:
            where = {"host": keeper.host, "port": keeper.port}
            tell(self._socket, do="copy", **self._named(), step=step, **where)
            return bool((hear(self._socket) or {}).get("is_whole"))
        address, size = (keeper.host, keeper.port), self._plan.num_bytes
        with suppress(OSError), socket.create_connection(address, PEER_TIMEOUT_S) as peer:
            tell(peer, do="put", **self._named(), step=step, num_bytes=size)
            peer.sendall(version.memory)
            return bool((hear(peer) or {}).get("is_whole"))
        return False

    def _is_there(self, step: int) -> bool:
        """Whether the keeper beside, if there is one, lives and has it."""
        if self._socket is None:
            return True
        tell(self._socket, do="steps", **self._named())
        return step in (hear(self._socket) or {}).get("steps", ())

    def _named(self) -> dict[str, object]:
        return {"worker": self._worker, "generation": self.order.generation}


def read_snapshot(
    part: Carried,
    keeper: Keeper,
    node: str,
    specs: Sequence[TensorSpec],
    old: Assignment,
    step: int,
) -> dict[str, Tensor]:
    """An old member's part out of its snapshot: in place where the keeper is beside this worker,
    else over the network. Raises ConnectionError if it is not there any more."""
    plan = Plan.of(specs, old, part.member)
    asked = {"worker": part.member, "generation": old.generation, "step": step}
    try:
        memory = _opened(keeper, asked) if keeper.node == node else _fetched(keeper, asked)
    except OSError as error:
        raise ConnectionError(f"the keeper on {keeper.node}: {error}") from error
    if len(memory) != plan.num_bytes:
        raise ConnectionError(f"{part.member}'s snapshot has {len(memory)} bytes")
    return plan.tensors(memory)


def _opened(keeper: Keeper, asked: Mapping[str, object]) -> memoryview:
    with socket.socket(socket.AF_UNIX) as beside:
        beside.connect(address_of(keeper.socket))
        tell(beside, do="open", **asked)
        num_bytes = _found(hear(beside))
        _, [fd], *_ = socket.recv_fds(beside, 1, 1)
    version = Version(fd, num_bytes)
    return version.memory


def _fetched(keeper: Keeper, asked: Mapping[str, object]) -> memoryview:
    with socket.create_connection((keeper.host, keeper.port), PEER_TIMEOUT_S) as afar:
        tell(afar, do="get", **asked)
        memory = memoryview(bytearray(_found(hear(afar))))
        receive_into(afar, memory)
    return memory


def _found(answer: Mapping[str, int] | None) -> int:
    num_bytes = (answer or {}).get("num_bytes", NOT_WHOLE)
    if num_bytes == NOT_WHOLE:
        raise ConnectionError("it has no such snapshot")
    return num_bytes
