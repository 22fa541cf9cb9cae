"""Where a part's tensors lie in the memory of its snapshot, and how one is read again."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from actors.runtime.handshake import connect_afar, connect_beside
from actors.snapshots.buffer import NOT_WHOLE, PEER_TIMEOUT_S, Version
from actors.snapshots.messages import hear, receive_into, tell
from actors.snapshots.parity import make_again
from elastic.geometry.assignment import Assignment
from elastic.geometry.shard_map import region_of
from elastic.geometry.tensor_specs import TensorSpec
from elastic.reshard.reshard_plan import Carried
from elastic.reshard.snapshot_placement import SnapshotServer

ALIGNED_BYTES = 64


@dataclass(frozen=True)
class MemoryLayout:
    """Where each tensor of a part lies in a snapshot: a function of the part alone."""

    places: tuple[tuple[str, int, tuple[int, ...], torch.dtype], ...]
    num_bytes: int

    @classmethod
    def of(cls, specs: Sequence[TensorSpec], assignment: Assignment, member: str) -> MemoryLayout:
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


def most_bytes(specs: Sequence[TensorSpec]) -> int:
    """No snapshot of any part under any assignment takes more: that of the whole state."""
    return sum(-(-spec.num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES for spec in specs)


def sizes_of(
    specs: Sequence[TensorSpec], assignment: Assignment, members: Sequence[str]
) -> list[int]:
    """How many bytes a snapshot of each of these members has."""
    return [MemoryLayout.of(specs, assignment, member).num_bytes for member in members]


def read_snapshot(
    part: Carried,
    snapshot_servers: Mapping[str, SnapshotServer],
    node: str,
    specs: Sequence[TensorSpec],
    old: Assignment,
    step: int,
    secret: bytes,
) -> dict[str, Tensor]:
    """An old member's part out of its snapshot: in place where the keeper is beside this worker,
    else over the network; or made again of those of others. `keepers` are by node.

    Raises ConnectionError if it is not there any more.
    """
    plan = MemoryLayout.of(specs, old, part.member)
    named = {"generation": old.generation, "step": step}
    asked = {"worker": part.member, **named}
    try:
        if part.others:
            sizes = sizes_of(specs, old, [worker for worker, _ in part.others])
            memory = make_again(part.member, part.others, snapshot_servers, sizes, named, secret)
        elif part.snapshot_server == node:
            memory = _opened(snapshot_servers[part.snapshot_server], asked, plan.num_bytes, secret)
        else:
            memory = _fetched(snapshot_servers[part.snapshot_server], asked, plan.num_bytes, secret)
    except OSError as error:
        raise ConnectionError(f"the keeper on {', '.join(part.nodes)}: {error}") from error
    if len(memory) != plan.num_bytes:
        raise ConnectionError(f"{part.member}'s snapshot has {len(memory)} bytes")
    return plan.tensors(memory)


def _opened(
    snapshot_server: SnapshotServer, asked: Mapping[str, object], num_bytes: int, secret: bytes
) -> memoryview:
    with connect_beside(snapshot_server.socket, secret, PEER_TIMEOUT_S) as beside:
        tell(beside, do="open", **asked)
        _check_found(hear(beside), num_bytes)
        _, fds, *_ = socket.recv_fds(beside, 1, 1)
    if not fds:
        raise ConnectionError("it hung up")
    return Version(fds[0], num_bytes).memory


def _fetched(
    snapshot_server: SnapshotServer, asked: Mapping[str, object], num_bytes: int, secret: bytes
) -> memoryview:
    with connect_afar((snapshot_server.host, snapshot_server.port), secret, PEER_TIMEOUT_S) as afar:
        tell(afar, do="get", **asked)
        _check_found(hear(afar), num_bytes)
        memory = memoryview(bytearray(num_bytes))
        receive_into(afar, memory)
    return memory


def _check_found(answer: Mapping[str, int] | None, num_bytes: int) -> None:
    """Raises ConnectionError, before memory is taken, for a snapshot of another size or none."""
    found = (answer or {}).get("num_bytes", NOT_WHOLE)
    if found == NOT_WHOLE:
        raise ConnectionError("it has no such snapshot")
    if found != num_bytes:
        raise ConnectionError(f"its snapshot has {found} bytes, not {num_bytes}")
