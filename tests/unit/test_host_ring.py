"""The ring of pinned slots: apply waits for copies, reuse of slots, errors, two consumers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from threaded_copies import TIMEOUT_S, ThreadedEngine, threaded_engine
from torch import Tensor

from actors.distributed.state_transfer import stage
from actors.host_memory.host_copy import CopyStopped, HostCopy, copy_tensors
from actors.host_memory.host_ring import HostRing, RingSlot, SlotPiece, ring_for
from actors.snapshots.sink import PendingSnapshot
from actors.worker.part_writer import CheckpointPart
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.regions import Region
from elastic.geometry.tensor_specs import TensorSpec
from elastic.reshard.transfers import Transfers

SLOT_BYTES = 1024
NUM_SLOTS = 2
SHAPES = {"weight": (40, 33), "bias": (7,), "step": (), "none": (0, 3), "exact": (256,)}


@pytest.fixture
def engine() -> Iterator[ThreadedEngine]:
    with threaded_engine() as engine:
        yield engine


@pytest.fixture
def ring(engine: ThreadedEngine) -> HostRing:
    return HostRing(engine, NUM_SLOTS, SLOT_BYTES)


def drawn(engine: ThreadedEngine, seed: int = 0) -> dict[str, Tensor]:
    """Tensors on the device: of several dtypes, larger than a slot, empty, and not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    tensors["half"] = torch.randn(900, generator=generator).bfloat16()
    tensors["turned"] = torch.randn(30, 40, generator=generator, dtype=torch.float64).T
    tensors["flags"] = torch.rand(13, generator=generator) > 0.5
    return {name: engine.on_device(tensor) for name, tensor in tensors.items()}


def copies_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def apply_on(engine: ThreadedEngine, tensors: dict[str, Tensor]) -> None:
    """Change all tensors on the compute stream, as an optimizer does."""
    for tensor in tensors.values():
        engine.compute.submit(lambda tensor=tensor: tensor.zero_())  # type: ignore[misc]


def test_tensors_in_host_memory_need_no_ring() -> None:
    assert ring_for([torch.zeros(3)]) is None
    source = torch.arange(5.0)
    copy = HostCopy([source])
    [target] = copy.to_host([source])
    assert copy.hold_changes(0.0)
    assert torch.equal(target, source) and target.data_ptr() != source.data_ptr()


def test_copies_equal_their_sources(engine: ThreadedEngine, ring: HostRing) -> None:
    tensors = drawn(engine)
    copied = HostCopy(tensors.values(), ring).to_host(list(tensors.values()))
    assert_equal(dict(zip(tensors, copied, strict=True)), tensors)


def test_slots_are_allocated_once(engine: ThreadedEngine, ring: HostRing) -> None:
    for seed in range(3):
        tensors = drawn(engine, seed)
        HostCopy(tensors.values(), ring).to_host(list(tensors.values()))
    assert engine.num_allocated == NUM_SLOTS


def test_copies_wait_for_the_compute_stream(engine: ThreadedEngine, ring: HostRing) -> None:
    source = engine.on_device(torch.zeros(2000))

    def apply() -> None:
        time.sleep(0.1)
        source.fill_(7.0)

    engine.compute.submit(apply)
    [copied] = HostCopy([source], ring).to_host([source])
    assert bool((copied == 7.0).all())


def test_apply_begins_after_the_copies(engine: ThreadedEngine, ring: HostRing) -> None:
    """The apply is submitted while copies are under way: the compute stream must wait for them."""
    engine.copy_s = 0.02
    tensors = drawn(engine)
    expected = copies_of(tensors)
    copy = HostCopy(tensors.values(), ring)
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(copy.to_host, list(tensors.values()))
        assert copy.hold_changes(TIMEOUT_S)
        assert not engine.record_copies().is_complete.is_set(), "the host need not wait for copies"
        apply_on(engine, tensors)
        copied = copying.result(TIMEOUT_S)
    assert_equal(dict(zip(tensors, copied, strict=True)), expected)
    engine.record_compute().synchronize()
    assert not any(tensor.any() for tensor in tensors.values())


def test_apply_is_not_issued_before_all_copies_are(engine: ThreadedEngine, ring: HostRing) -> None:
    source = engine.on_device(torch.zeros(4000))
    blocked = threading.Event()
    engine.compute.submit(lambda: blocked.wait(TIMEOUT_S) and None)
    copy = HostCopy([source], ring)
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(copy.to_host, [source])
        assert not copy.hold_changes(0.1), "the ring holds a part of the tensor only"
        blocked.set()
        assert copy.hold_changes(TIMEOUT_S)
        copying.result(TIMEOUT_S)


class WatchedRing(HostRing):
    """A ring whose consumers pause, and that records when slots are filled and given back."""

    def __init__(self, engine: ThreadedEngine, num_slots: int, slot_bytes: int) -> None:
        super().__init__(engine, num_slots, slot_bytes)
        self.lock = threading.Lock()
        self.in_use: set[int] = set()
        self.most_in_use = 0
        self.num_filled = 0

    def _fill(self, slot: RingSlot, pieces: list[SlotPiece]) -> object:  # type: ignore[override]
        with self.lock:
            assert id(slot) not in self.in_use, "overwritten before it was given back"
            self.in_use.add(id(slot))
            self.most_in_use = max(self.most_in_use, len(self.in_use))
            self.num_filled += 1
        return super()._fill(slot, pieces)

    def _give_back(self, slot: RingSlot) -> None:
        time.sleep(0.01)
        with self.lock:
            self.in_use.discard(id(slot))
        super()._give_back(slot)


def test_slot_is_not_filled_before_its_consumer_gave_it_back(engine: ThreadedEngine) -> None:
    """Consumers are slower than copies, so that all slots are in use: the copies have to wait."""
    engine.copy_s = 0.0
    ring = WatchedRing(engine, NUM_SLOTS, SLOT_BYTES)
    seeds = range(3)
    states = [drawn(engine, seed) for seed in seeds]

    def copy(tensors: dict[str, Tensor]) -> list[Tensor]:
        return HostCopy(tensors.values(), ring).to_host(list(tensors.values()))

    with ThreadPoolExecutor(len(states)) as pool:
        results = list(pool.map(copy, states, timeout=TIMEOUT_S))
    for tensors, copied in zip(states, results, strict=True):
        assert_equal(dict(zip(tensors, copied, strict=True)), tensors)
    assert ring.most_in_use == NUM_SLOTS < ring.num_filled
    assert not ring.in_use and engine.num_allocated == NUM_SLOTS


def test_two_consumers_share_the_slots_fairly(engine: ThreadedEngine, ring: HostRing) -> None:
    """A small copy that begins during a large one ends long before it."""
    large = engine.on_device(torch.zeros(100 * SLOT_BYTES, dtype=torch.uint8))
    small = engine.on_device(torch.ones(2 * SLOT_BYTES, dtype=torch.uint8))
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(HostCopy([large], ring).to_host, [large])
        while engine.num_copies < 10:
            time.sleep(0.001)
        [copied] = HostCopy([small], ring).to_host([small])
        assert not copying.done() and engine.num_copies < 30
        assert bool(copied.all())
        copying.result(TIMEOUT_S)


def test_failing_copy_leaves_ring_and_sources_unused(
    engine: ThreadedEngine, ring: HostRing
) -> None:
    source = engine.on_device(torch.zeros(4000))
    engine.fails_at, engine.copy_s = 2, 0.2
    copy = HostCopy([source], ring)
    with pytest.raises(RuntimeError, match="cannot be issued"):
        copy.to_host([source])
    assert copy.hold_changes(0.0), "training goes on, or raises the error elsewhere"
    assert engine.record_copies().is_complete.wait(0.05), "nothing reads the source"
    tensors = drawn(engine)
    copied = HostCopy(tensors.values(), ring).to_host(list(tensors.values()))
    assert_equal(dict(zip(tensors, copied, strict=True)), tensors)


def test_failing_consumer_gives_all_slots_back(engine: ThreadedEngine, ring: HostRing) -> None:
    source = engine.on_device(torch.zeros(4000))
    for _ in range(NUM_SLOTS + 1):
        copy = HostCopy([source], ring)
        with pytest.raises(RuntimeError):
            copy.run([(source, torch.zeros(4001))])
        assert copy.hold_changes(0.0)
    [copied] = HostCopy([source], ring).to_host([source])
    assert torch.equal(copied, source)


def test_stopped_copy_ends_at_its_next_slot(engine: ThreadedEngine, ring: HostRing) -> None:
    """The generation is aborted while copies are under way."""
    source = engine.on_device(torch.zeros(1000 * SLOT_BYTES, dtype=torch.uint8))
    copy = HostCopy([source], ring)
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(copy.to_host, [source])
        while engine.num_copies < 5:
            time.sleep(0.001)
        copy.stop()
        assert copy.hold_changes(TIMEOUT_S)
        with pytest.raises(CopyStopped):
            copying.result(TIMEOUT_S)
    assert engine.num_copies < 50
    tensors = drawn(engine)
    copied = HostCopy(tensors.values(), ring).to_host(list(tensors.values()))
    assert_equal(dict(zip(tensors, copied, strict=True)), tensors)


def test_uploads_reach_the_compute_stream_complete(engine: ThreadedEngine, ring: HostRing) -> None:
    tensors, host = drawn(engine), copies_of(drawn(engine, 1))
    expected, seen = copies_of(host), dict[str, Tensor]()
    ring.upload([(host[name], tensors[name]) for name in host])
    for tensor in host.values():
        tensor.zero_()  # the slots have the bytes

    def read() -> None:
        seen.update(copies_of(tensors))

    engine.compute.submit(read)
    engine.record_compute().synchronize()
    assert_equal(seen, expected)


def test_uploads_wait_for_earlier_reads_of_their_targets(
    engine: ThreadedEngine, ring: HostRing
) -> None:
    buffer, seen = engine.on_device(torch.ones(300)), []

    def send() -> None:
        time.sleep(0.1)
        seen.append(buffer.sum().item())

    engine.compute.submit(send)
    ring.upload([(torch.zeros(300), buffer)])
    engine.record_compute().synchronize()
    assert seen == [300.0] and not buffer.any()


def test_offloaded_tensors_are_copied_before_the_host_changes_them(
    engine: ThreadedEngine, ring: HostRing
) -> None:
    """A state of which a part is in host memory: the host must wait until that is copied."""
    on_device, on_host = engine.on_device(torch.ones(3000)), torch.zeros(10)

    def offload() -> None:
        time.sleep(0.05)
        on_host.fill_(3.0)

    engine.compute.submit(offload)
    copy = HostCopy([on_device, on_host], ring)
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(copy.to_host, [on_device, on_host])
        assert copy.hold_changes(TIMEOUT_S)
        on_host.zero_()
        copied = copying.result(TIMEOUT_S)
    assert bool((copied[0] == 1.0).all()) and bool((copied[1] == 3.0).all())


def test_tensors_in_host_memory_are_uploaded_and_others_copied_in_place(
    engine: ThreadedEngine, ring: HostRing
) -> None:
    on_device, on_host = engine.on_device(torch.ones(3)), torch.full((3,), 2.0)
    targets = [engine.on_device(torch.zeros(3)), engine.on_device(torch.zeros(3)), torch.zeros(3)]
    copy_tensors(list(zip([on_host, on_device, on_host], targets, strict=True)), ring)
    engine.record_compute().synchronize()
    assert [target[0].item() for target in targets] == [2.0, 1.0, 2.0]
    assert engine.num_copies == 1


def test_staging_moves_only_what_does_not_stay(engine: ThreadedEngine, ring: HostRing) -> None:
    specs = [TensorSpec(name, (4,)) for name in ("stays", "moves", "offloaded")]
    region = Region((0,), (4,))
    transfers = Transfers(own_part=0, old_regions={0: dict.fromkeys(range(3), region)}, kept={0})
    held = {spec.name: torch.full((4,), 5.0) for spec in specs}
    for name in ("stays", "moves"):
        engine.on_device(held[name])
    before = dict(held)
    staged = stage(specs, transfers, held, ring)
    assert list(staged) == list(before) and not held
    assert staged["stays"] is before["stays"] and staged["offloaded"] is before["offloaded"]
    assert torch.equal(staged["moves"], before["moves"])
    assert not engine.owns(staged["moves"])


def snapshot_of(tensors: dict[str, Tensor], ring: HostRing) -> PendingSnapshot:
    assignment = Assignment(1, Layout(dp=1), ("w0",))
    return PendingSnapshot(1, 0, assignment, tensors, ring)


def test_snapshot_and_checkpoint_part_share_the_ring(
    engine: ThreadedEngine, ring: HostRing
) -> None:
    tensors = drawn(engine)
    expected = copies_of(tensors)
    snapshot = snapshot_of(tensors, ring)
    regions = {n: Region((0,) * tensor.ndim, tuple(tensor.shape)) for n, tensor in tensors.items()}
    part = CheckpointPart(1, 1, {name: (regions[name], tensors[name]) for name in tensors}, ring)
    places = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()
    }
    with ThreadPoolExecutor(2) as pool:
        copies = pool.submit(snapshot.copy_to, places), pool.submit(part.copy)
        while not snapshot._has_begun:
            time.sleep(0.001)
        snapshot.await_copied()
        assert part.host_copy.hold_changes(TIMEOUT_S)
        apply_on(engine, tensors)
        assert copies[0].result(TIMEOUT_S)
        copies[1].result(TIMEOUT_S)
    assert_equal(places, expected)
    assert_equal({name: tensor for name, (_, tensor) in part.tensors.items()}, expected)


def test_stopped_snapshot_is_not_complete(engine: ThreadedEngine, ring: HostRing) -> None:
    tensors = drawn(engine)
    snapshot = snapshot_of(tensors, ring)
    snapshot.stop()
    places = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert not snapshot.copy_to(places)
    snapshot.await_copied()


def test_snapshot_that_has_not_begun_is_cancelled(engine: ThreadedEngine, ring: HostRing) -> None:
    snapshot = snapshot_of(drawn(engine), ring)
    snapshot.await_copied()
    assert not snapshot.copy_to({}) and engine.num_copies == 0
