"""The memory layout of a snapshot, and reading a worker's part from snapshot servers."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from actors.runtime.handshake import connect_local, connect_remote
from actors.snapshots.buffer import NOT_WHOLE, PEER_TIMEOUT_S, Version
from actors.snapshots.messages import receive_into, receive_message, send_message
from actors.snapshots.parity import rebuild_part
from elastic.geometry.assignment import Assignment
from elastic.geometry.shard_map import region_of
from elastic.geometry.tensor_specs import TensorSpec
from elastic.reshard.reshard_plan import CarriedPart
from elastic.reshard.snapshot_placement import SnapshotServer

ALIGNED_BYTES = 64


@dataclass(frozen=True)
class MemoryLayout:
    """Where each tensor of a part lies in a snapshot: a function of the part alone."""

    places: tuple[tuple[str, int, tuple[int, ...], torch.dtype], ...]
    """Name, first byte, shape and dtype of each tensor."""
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
        """A part's tensors, as views into the memory of a snapshot."""
        tensors = {}
        for name, begin, shape, dtype in self.places:
            count = prod(shape)
            flat = torch.empty(0, dtype=dtype)
            if count:
                flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=begin)
            tensors[name] = flat.view(shape)
        return tensors


def most_bytes(specs: Sequence[TensorSpec]) -> int:
    """The size of a snapshot of the whole state: the largest that any part can have."""
    return sum(-(-spec.num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES for spec in specs)


def sizes_of(
    specs: Sequence[TensorSpec], assignment: Assignment, members: Sequence[str]
) -> list[int]:
    """The snapshot size in bytes of each of these members."""
    return [MemoryLayout.of(specs, assignment, member).num_bytes for member in members]


def read_snapshot(
    part: CarriedPart,
    snapshot_servers: Mapping[str, SnapshotServer],
    node: str,
    specs: Sequence[TensorSpec],
    old: Assignment,
    step: int,
    secret: bytes,
) -> dict[str, Tensor]:
    """Read an old member's part from its snapshot, or rebuild it from the rest of its parity set.

    The snapshot is mapped in place if its server is on this worker's node, else fetched over the
    network. `snapshot_servers` are by node. Raises ConnectionError if the snapshot is gone.
    """
    layout = MemoryLayout.of(specs, old, part.member)
    version = {"generation": old.generation, "step": step}
    request = {"worker": part.member, **version}
    try:
        if part.others:
            sizes = sizes_of(specs, old, [worker for worker, _ in part.others])
            memory = rebuild_part(
                part.member, part.others, snapshot_servers, sizes, version, secret
            )
        else:
            server = snapshot_servers[part.snapshot_server]
            read = _map_snapshot if part.snapshot_server == node else _fetch_snapshot
            memory = read(server, request, layout.num_bytes, secret)
    except OSError as error:
        nodes = ", ".join(part.nodes)
        raise ConnectionError(f"the snapshot server on {nodes}: {error}") from error
    if len(memory) != layout.num_bytes:
        raise ConnectionError(
            f"{part.member}'s snapshot has {len(memory)} bytes, not {layout.num_bytes}"
        )
    return layout.tensors(memory)


def _map_snapshot(
    snapshot_server: SnapshotServer, request: Mapping[str, object], num_bytes: int, secret: bytes
) -> memoryview:
    """Map a snapshot of the server on this node."""
    with connect_local(snapshot_server.socket, secret, PEER_TIMEOUT_S) as connection:
        send_message(connection, do="open", **request)
        _check_size(receive_message(connection), num_bytes)
        _, fds, *_ = socket.recv_fds(connection, 1, 1)
    if not fds:
        raise ConnectionError("it closed the connection")
    return Version(fds[0], num_bytes).memory


def _fetch_snapshot(
    snapshot_server: SnapshotServer, request: Mapping[str, object], num_bytes: int, secret: bytes
) -> memoryview:
    """Fetch a snapshot over the network."""
    address = (snapshot_server.host, snapshot_server.port)
    with connect_remote(address, secret, PEER_TIMEOUT_S) as connection:
        send_message(connection, do="get", **request)
        _check_size(receive_message(connection), num_bytes)
        memory = memoryview(bytearray(num_bytes))
        receive_into(connection, memory)
    return memory


def _check_size(answer: Mapping[str, int] | None, num_bytes: int) -> None:
    """Raises ConnectionError if there is no snapshot or it has another size, before allocating."""
    held_bytes = (answer or {}).get("num_bytes", NOT_WHOLE)
    if held_bytes == NOT_WHOLE:
        raise ConnectionError("it has no such snapshot")
    if held_bytes != num_bytes:
        raise ConnectionError(f"its snapshot has {held_bytes} bytes, not {num_bytes}")
