"""ZeRO stages and related settings: memory and equality of training, measured in real processes."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing import set_forkserver_preload
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from expected import expected
from harness import run_in_processes
from ranks import formed_groups, open_file_store
from test_replica import CountCollectives, interrupt_never, local_tensors, program_of
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes

from actors.runtime.fault_spec import Fault
from actors.runtime.program import StateBytes
from actors.storage.storage import DiskStorage
from elastic.geometry.layout import Layout
from elastic.geometry.regions import Region
from elastic.geometry.zero import STAGES
from elastic.planner.footprint import Footprint
from elastic.protocol.votes import Vote
from pipelines.run.program import TrainingProgram
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings, TrainSettings
from pipelines.training.replica.replica import ShardedReplica
from pipelines.training.workload.workload import ModuleInputs

NUM_PROCESSES = 4
NUM_STEPS = 3
FULL = Footprint(parameters=4, gradients=4, optimizer=8)
"""Bytes per parameter in float32 with Adam."""
SETTINGS = tiny().model_copy(
    update={
        "model": tiny().model.model_copy(update={"num_layers": 6}),
        "data": DataSettings(source="random", seq_len=16),
        "batch": 8,
        "eval_every": 1,
        "eval_samples": 4,
        "sync_each_microbatch": True,
        "pass_samples": 1,
    }
)


class Case(NamedTuple):
    """A layout and changed settings."""

    layout: str
    changes: dict[str, Any] = {}  # noqa: RUF012

    @property
    def name(self) -> str:
        return " ".join([self.layout, *(f"{key}={value}" for key, value in self.changes.items())])

    @property
    def settings(self) -> TrainSettings:
        return SETTINGS.model_copy(update=self.changes)


SIZE_CASES = [
    Case(f"{axes},zero={zero}") for axes in ("fsdp=2", "fsdp=4", "dp=2,fsdp=2") for zero in STAGES
]
OTHER_CASES = [
    Case("fsdp=2,zero=3", {"reshard_after_forward": False}),
    Case("fsdp=2,zero=3", {"sync_each_microbatch": False}),
    Case("dp=2,fsdp=2,zero=3", {"dtype": "bfloat16"}),
    *(Case(f"fsdp=2,zero={zero}", {"offload": True}) for zero in STAGES),
    Case("dp=2,fsdp=2,zero=2", {"offload": True}),
    *(Case(f"fsdp=2,zero={zero}", {"activation_checkpointing": "full"}) for zero in (1, 2)),
    *(Case(f"fsdp=2,zero={zero}", {"activation_checkpointing": "selective"}) for zero in (2, 3)),
    *(Case(f"fsdp=2,zero={zero}", {"dtype": "bfloat16"}) for zero in (1, 2, 3)),
    *(Case(f"fsdp=2,zero={zero}", {"dtype": "bfloat16", "offload": True}) for zero in (1, 3)),
]


class Trained(NamedTuple):
    """The results of one rank."""

    losses: list[float]
    held_out: float
    at_rest: StateBytes
    in_step: StateBytes
    tensors: dict[str, torch.Tensor]
    between_bytes: int
    num_collectives: int
    num_collectives_in_apply: int


class MeasuredReplica(ShardedReplica):
    """Counts the bytes of all tensors before each step's last microbatch, minus those at its start.

    A thread of Gloo may hold the tensors of its last collective a moment longer, so that a count is
    now and then too small or too large.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.between_bytes: list[int] = []

    def _feed_round(self, step: int, microbatches: Sequence[int]) -> ModuleInputs:
        first, *_, last = self.data_shard.rounds(
            self.settings.num_microbatches, self.passes.num_rounds
        )
        if microbatches == first:
            self.between_bytes.append(-bytes_of_all_tensors())
        elif microbatches == last:
            self.between_bytes[-1] += bytes_of_all_tensors()
        return super()._feed_round(step, microbatches)


def bytes_of_all_tensors() -> int:
    gc.collect()  # leftovers of the previous case must not be freed between the counts
    tensors = [obj for obj in gc.get_objects() if isinstance(obj, torch.Tensor)]
    locals_ = (obj.to_local() if isinstance(obj, DTensor) else obj for obj in tensors)
    storages = [tensor.untyped_storage() for tensor in locals_ if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def train(
    program: TrainingProgram, replica: MeasuredReplica, initial_tensors: dict[str, Any]
) -> Trained:
    replica.adopt(initial_tensors)
    at_rest, losses = replica.state_bytes(), []
    for step in range(1, NUM_STEPS + 1):
        with CountCollectives() as in_compute:
            sums = replica.compute(step, interrupt_never)
        in_step = replica.state_bytes()
        dist.all_reduce(sums)
        loss_sum, num_tokens, sq_grad_norm = sums.tolist()
        with CountCollectives() as in_apply:
            world_size = dist.get_world_size()
            replica.apply(step, Vote(step, loss_sum, int(num_tokens), sq_grad_norm, world_size))
        losses.append(loss_sum / num_tokens)
    held_out = replica.evaluate(NUM_STEPS, interrupt_never).loss
    tensors = {name: tensor.clone() for name, tensor in replica.tensors().items()}
    return Trained(
        losses,
        held_out,
        at_rest,
        in_step,
        tensors,
        median_low(replica.between_bytes),
        in_compute.num_collectives,
        in_apply.num_collectives,
    )


def run_rank(world_rank: int, folder: Path) -> None:
    """Train each case that has this rank."""
    torch.set_num_threads(1)
    store = open_file_store(folder, NUM_PROCESSES)
    gc.freeze()  # the counts need not walk the million objects that imports created
    for case in SIZE_CASES + OTHER_CASES:
        layout = Layout.parse(case.layout)
        if world_rank >= layout.num_workers:
            continue
        program = program_of(case.settings)
        with formed_groups(layout, store, case.name, world_rank) as groups:
            replica = MeasuredReplica(program.workload, program.settings, groups)
            trained = train(program, replica, local_tensors(program, groups))
            if case.name == "fsdp=2,zero=1":
                assert_adopted_again(program, replica, program.build(groups))
            if case.name == "fsdp=2,zero=3":
                assert_releases_full_tensors(replica, program.build(groups))
        torch.save(trained._asdict(), folder / f"{case.name}-{world_rank}.pt")


def assert_releases_full_tensors(replica: ShardedReplica, successor: ShardedReplica) -> None:
    """As after a reshard from stage 2, where each shard is a view of a full tensor."""
    old_tensors = replica.tensors()
    views = {
        name: torch.cat([tensor, tensor])[: len(tensor)] if tensor.ndim else tensor
        for name, tensor in old_tensors.items()
    }
    successor.adopt(views)
    assert successor.state_bytes().param_bytes == replica.state_bytes().param_bytes
    for name, tensor in successor.tensors().items():
        assert torch.equal(tensor, old_tensors[name])


def assert_adopted_again(
    program: TrainingProgram, replica: ShardedReplica, successor: ShardedReplica
) -> None:
    """As after a reshard in which a worker keeps its shard: the full tensors stay in memory."""
    old_tensors = replica.tensors()
    copies = {name: tensor.clone() for name, tensor in old_tensors.items()}
    successor.adopt(old_tensors)
    for name, tensor in successor.tensors().items():
        assert tensor.data_ptr() == old_tensors[name].data_ptr() or not tensor.numel()
    assert successor.state_bytes() == replica.state_bytes()
    successor.evaluate(0, interrupt_never)
    for name, tensor in successor.tensors().items():
        assert torch.equal(tensor, copies[name])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zero")
    set_forkserver_preload(["pipelines.run.program"])
    start_processes(run_rank, (folder,), NUM_PROCESSES, start_method="forkserver")
    return folder


def ranks_of(folder: Path, case: Case) -> list[Trained]:
    num_workers = Layout.parse(case.layout).num_workers
    files = [folder / f"{case.name}-{rank}.pt" for rank in range(num_workers)]
    return [Trained(**torch.load(file, weights_only=False)) for file in files]


@pytest.mark.slow
@pytest.mark.parametrize("case", SIZE_CASES, ids=lambda case: case.name)
def test_measured_bytes_equal_the_footprint_of_the_stage(folder: Path, case: Case) -> None:
    layout = Layout.parse(case.layout)
    num_params = whole_bytes(case) // 4
    footprints = {
        "param_bytes": Footprint(4, 0, 0),
        "grad_bytes": Footprint(0, 4, 0),
        "optimizer_bytes": Footprint(0, 0, 8),
    }
    for trained in ranks_of(folder, case):
        measured = asdict(trained.in_step)
        for name, footprint in footprints.items():
            expected = num_params * footprint.divided(layout.zero, layout.fsdp)
            assert measured[name] == pytest.approx(expected, rel=0.05), name
        total = num_params * FULL.divided(layout.zero, layout.fsdp)
        assert sum(measured.values()) == pytest.approx(total, rel=0.05)
        assert trained.at_rest == trained.in_step, "grad_bytes at rest is the expected size"


@pytest.mark.slow
@pytest.mark.parametrize("case", SIZE_CASES + OTHER_CASES, ids=lambda case: case.name)
def test_all_stages_and_settings_train_equally(folder: Path, case: Case) -> None:
    plain = ranks_of(folder, Case("fsdp=2,zero=3"))[0]
    is_float32 = case.settings.dtype == "float32"
    for trained in ranks_of(folder, case):
        assert trained.losses == pytest.approx(plain.losses, rel=1e-5 if is_float32 else 0.02)
        assert trained.held_out == pytest.approx(plain.held_out, rel=1e-5 if is_float32 else 0.02)
        assert trained.num_collectives_in_apply == 0


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2])
def test_mixed_precision_of_stages_1_and_2_equals_stage_3(folder: Path, zero: int) -> None:
    changes = {"dtype": "bfloat16"}
    expected = ranks_of(folder, Case("fsdp=2,zero=3", changes))
    ranks = ranks_of(folder, Case(f"fsdp=2,zero={zero}", changes))
    for actual, reference in zip(ranks, expected, strict=True):
        assert actual.losses == pytest.approx(reference.losses, rel=1e-6)
        for name, tensor in reference.tensors.items():
            assert actual.tensors[name].dtype == tensor.dtype
            torch.testing.assert_close(actual.tensors[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("zero", [1, 2])
def test_kill_in_apply_changes_no_loss_or_weight(zero: int, tmp_path: Path) -> None:
    """The dead worker held a shard that its replica has too; the others roll forward."""
    settings = SETTINGS.model_copy(update={"dtype": "float64", "steps": 16, "eval_every": 8})
    fault = Fault("kill", "w1", 6, "apply")
    layout = f"dp=2,fsdp=2,zero={zero}"
    run = run_in_processes(tmp_path, settings, 4, layout=layout, faults=(fault,))
    assert run.stopped.outcome == "completed", run.stopped
    assert not run.lines_of("RolledBack")
    assert run.lines_of("Resume")[1]["layout"].endswith(f"zero={zero}")
    losses_and_norms, weights = expected(settings, settings.steps)
    losses, norms = zip(*losses_and_norms, strict=True)
    assert [line["loss"] for line in run.metrics] == pytest.approx(losses, rel=1e-9)
    assert [line["grad_norm"] for line in run.metrics] == pytest.approx(norms, rel=1e-9)
    [checkpoint] = (run.folder / "checkpoints").glob("step-*")
    regions = {name: Region.whole(tuple(weight.shape)) for name, weight in weights.items()}
    for name, weight in program_of(settings).read_regions(DiskStorage(checkpoint), regions).items():
        torch.testing.assert_close(weight, weights[name].detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_without_reshard_after_forward_a_block_is_gathered_once_a_step(folder: Path) -> None:
    unsharded = ranks_of(folder, Case("fsdp=2,zero=3", {"reshard_after_forward": False}))[0]
    resharded = ranks_of(folder, Case("fsdp=2,zero=3"))[0]
    num_blocks, rounds = SETTINGS.model.num_layers, SETTINGS.num_microbatches // 2
    assert resharded.num_collectives - unsharded.num_collectives >= num_blocks * rounds


@pytest.mark.slow
@pytest.mark.parametrize("case", SIZE_CASES, ids=lambda case: case.name)
def test_gradient_bytes_between_microbatches_equal_the_stage(folder: Path, case: Case) -> None:
    """The gradients of blocks that are being reduced do not count."""
    for trained in ranks_of(folder, case):
        grad_bytes = trained.in_step.grad_bytes
        block_bytes = whole_bytes(case) / SETTINGS.model.num_layers
        assert 0.95 * grad_bytes <= trained.between_bytes <= grad_bytes + 2 * block_bytes


@pytest.mark.slow
def test_without_sync_each_microbatch_whole_gradients_accumulate(folder: Path) -> None:
    case = Case("fsdp=2,zero=3", {"sync_each_microbatch": False})
    [summed, *_], [synced, *_] = ranks_of(folder, case), ranks_of(folder, Case("fsdp=2,zero=3"))
    assert summed.in_step == synced.in_step
    assert summed.between_bytes == pytest.approx(whole_bytes(case), rel=0.05)
    assert summed.num_collectives < synced.num_collectives


def whole_bytes(case: Case) -> int:
    """The bytes of all parameters, or of all gradients."""
    specs = program_of(case.settings).specs()
    return sum(spec.num_bytes for spec in specs if spec.kind == "parameter")
