"""The replica equals a plain loop, in one process and on any mesh of dp and fsdp."""

from __future__ import annotations

import json
import weakref
from contextlib import suppress
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from expected import expected as train_plain_loop
from ranks import GENERATION, formed_groups, open_file_store
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import TorchDispatchMode

from actors.runtime.program import Groups, StateBytes
from elastic.geometry.layout import Layout
from elastic.geometry.shard_map import region_of
from elastic.protocol.votes import Vote
from pipelines.run.program import TrainingProgram
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings, TrainSettings
from pipelines.training.replica.warm_up import group_of_one

NUM_STEPS = 10
NUM_PROCESSES = 4
LAYOUTS = (Layout(), Layout(dp=2), Layout(fsdp=2), Layout(fsdp=3), Layout(dp=2, fsdp=2))
SETTINGS = tiny().model_copy(
    update={
        "data": DataSettings(source="random", seq_len=16),
        "dtype": "float64",
        "batch": 5,
        "eval_every": 1,
        "eval_samples": 3,
    }
)
CPU = torch.device("cpu")


class Trained(NamedTuple):
    """The results of one rank."""

    losses: list[float]
    norms: list[float]
    held_out: float
    tensors: dict[str, torch.Tensor]
    is_uncopied: bool
    num_collectives_in_compute: int
    num_collectives_in_apply: int
    sizes: StateBytes


class CountCollectives(TorchDispatchMode):
    """Counts the collectives that run in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.num_collectives = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.num_collectives += "c10d" in operator.namespace
        return operator(*args, **(kwargs or {}))


def interrupt_never() -> None:
    """The `interrupt` that never raises."""


def program_of(settings: TrainSettings) -> TrainingProgram:
    return TrainingProgram(settings.model_dump(mode="json"), device="cpu")


def local_tensors(program: TrainingProgram, groups: Groups) -> dict[str, torch.Tensor]:
    """A rank's tensors at step 0, by the shard map."""
    layout = groups.assignment.layout
    coordinates = layout.coordinates(groups.world_rank)
    regions = {spec: region_of(spec, layout, coordinates) for spec in program.specs()}
    held_regions = {spec: region for spec, region in regions.items() if region is not None}
    return {spec.name: program.initial(spec, region) for spec, region in held_regions.items()}


def train(program: TrainingProgram, groups: Groups, num_steps: int = NUM_STEPS) -> Trained:
    replica = program.build(groups)
    initial_tensors = local_tensors(program, groups)
    replica.adopt(initial_tensors)
    adopted = replica.tensors()
    is_uncopied = all(
        adopted[name].data_ptr() == initial_tensors[name].data_ptr() for name in initial_tensors
    )
    held_out = replica.evaluate(0, interrupt_never).loss
    losses, norms = [], []
    for step in range(1, num_steps + 1):
        with CountCollectives() as in_compute:
            sums = replica.compute(step, interrupt_never)
        dist.all_reduce(sums)
        loss_sum, num_tokens, sq_grad_norm = sums.tolist()
        vote = Vote(step, loss_sum, int(num_tokens), sq_grad_norm, dist.get_world_size())
        with CountCollectives() as in_apply:
            norms.append(replica.apply(step, vote).grad_norm)
        losses.append(loss_sum / num_tokens)
    return Trained(
        losses,
        norms,
        held_out,
        {name: tensor.clone() for name, tensor in replica.tensors().items()},
        is_uncopied,
        in_compute.num_collectives,
        in_apply.num_collectives,
        replica.state_bytes(),
    )


def run_rank(world_rank: int, folder: Path) -> None:
    """Train under each layout that has this rank."""
    torch.set_num_threads(1)
    store = open_file_store(folder, NUM_PROCESSES)
    for layout in LAYOUTS:
        if world_rank >= layout.num_workers:
            continue
        log = {"record_samples": folder / f"{layout}.jsonl"}
        program = program_of(SETTINGS.model_copy(update=log))
        with formed_groups(layout, store, str(layout), world_rank) as groups:
            trained = train(program, groups)
        torch.save(trained._asdict(), folder / f"{layout}-{world_rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of all layouts, trained by four processes."""
    folder = tmp_path_factory.mktemp("replica")
    set_forkserver_preload(["pipelines.run.program"])
    start_processes(run_rank, (folder,), NUM_PROCESSES, start_method="forkserver")
    return folder


def trained_by(folder: Path, layout: Layout, world_rank: int) -> Trained:
    return Trained(**torch.load(folder / f"{layout}-{world_rank}.pt", weights_only=False))


@pytest.fixture(scope="module")
def expected() -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """The losses and final weights of the plain loop."""
    return train_plain_loop(SETTINGS, NUM_STEPS)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_equals_the_plain_loop(folder, expected, layout) -> None:
    losses_and_norms, weights = expected
    losses, norms = zip(*losses_and_norms, strict=True)
    ranks = [trained_by(folder, layout, rank) for rank in range(layout.num_workers)]
    for trained in ranks:
        assert trained.losses == pytest.approx(losses, rel=1e-9)
        assert trained.norms == pytest.approx(norms, rel=1e-9)
    for name, weight in weights.items():
        shards = [trained.tensors[name] for trained in ranks[: layout.fsdp]]
        torch.testing.assert_close(torch.cat(shards), weight.detach(), rtol=1e-9, atol=1e-12)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_replicas_stay_bit_equal(folder, layout) -> None:
    for rank in range(layout.fsdp, layout.num_workers):
        first = trained_by(folder, layout, rank % layout.fsdp).tensors
        for name, tensor in trained_by(folder, layout, rank).tensors.items():
            assert torch.equal(tensor, first[name]), name


def test_the_evaluation_is_bit_equal_under_every_layout(folder) -> None:
    values = {
        trained_by(folder, layout, rank).held_out
        for layout in LAYOUTS
        for rank in range(layout.num_workers)
    }
    assert len(values) == 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_apply_runs_no_collective(folder, layout) -> None:
    trained = trained_by(folder, layout, 0)
    assert (trained.num_collectives_in_compute > 0) == (layout.num_workers > 1)
    assert trained.num_collectives_in_apply == 0


def test_evenly_divided_parameters_are_adopted_without_a_copy(folder) -> None:
    assert trained_by(folder, Layout(dp=2), 1).is_uncopied
    assert trained_by(folder, Layout(dp=2, fsdp=2), 3).is_uncopied


def test_shards_take_their_fraction_of_the_memory(folder) -> None:
    whole = trained_by(folder, Layout(dp=2), 0).sizes
    half = trained_by(folder, Layout(fsdp=2), 0).sizes
    assert half.param_bytes == half.grad_bytes == whole.param_bytes / 2
    assert half.optimizer_bytes == pytest.approx(whole.optimizer_bytes / 2, rel=0.01)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_sample_id_is_read_once(folder, layout) -> None:
    rows = [json.loads(line) for line in (folder / f"{layout}.jsonl").read_text().splitlines()]
    read = sorted(sample_id for row in rows for sample_id in row["ids"])
    assert read == list(range(NUM_STEPS * SETTINGS.batch))
    assert {row["generation"] for row in rows} == {GENERATION}


class Aborted(Exception):
    """The exception of an abort."""


@pytest.mark.parametrize("num_calls", [0, 3, 7])
def test_an_abort_is_detected_within_one_block_of_forward_and_backward(num_calls) -> None:
    program = program_of(SETTINGS)
    calls = []

    def interrupt() -> None:
        calls.append(1)
        if len(calls) > num_calls:
            raise Aborted

    with group_of_one(CPU) as groups:
        replica = program.build(groups)
        replica.adopt(local_tensors(program, groups))
        with pytest.raises(Aborted):
            replica.compute(1, interrupt)
        initial_tensors = local_tensors(program, groups)
        assert all(
            torch.equal(initial_tensors[name], tensor) for name, tensor in replica.tensors().items()
        )
    assert len(calls) == num_calls + 1


def test_dropped_replica_is_freed_even_after_an_abort() -> None:
    program = program_of(SETTINGS)
    modules = []

    def abort() -> None:
        raise Aborted

    for interrupt in (interrupt_never, abort):
        with group_of_one(CPU) as groups:
            replica = program.build(groups)
            replica.adopt(local_tensors(program, groups))
            with suppress(Aborted):
                replica.compute(1, interrupt)
            modules.append(weakref.ref(replica.sharded.modules[0]))
            del replica
    assert [module() for module in modules] == [None, None]


def test_a_non_finite_step_does_not_change_the_state() -> None:
    program = program_of(SETTINGS)
    with group_of_one(CPU) as groups:
        replica = program.build(groups)
        replica.adopt(local_tensors(program, groups))
        replica.compute(1, interrupt_never)
        applied = replica.apply(1, Vote(1, 0.0, 80, 1.0, 1, num_nonfinite=1))
        initial_tensors = local_tensors(program, groups)
        assert applied.skipped and applied.grad_norm is None
        assert all(
            torch.equal(initial_tensors[name], tensor) for name, tensor in replica.tensors().items()
        )


@pytest.mark.parametrize(
    "change",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"microbatch": 5},
        {"batch": 10, "microbatch": 2},
    ],
    ids=str,
)
def test_computation_settings_do_not_change_the_losses(change) -> None:
    plain = SETTINGS.model_copy(update={"batch": change.get("batch", SETTINGS.batch)})
    losses = []
    for settings in (plain, plain.model_copy(update=change)):
        with group_of_one(CPU) as groups:
            losses.append(train(program_of(settings), groups, num_steps=3).losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_dropout_follows_the_microbatch_and_not_the_process() -> None:
    model = SETTINGS.model.model_copy(update={"dropout": 0.1})
    settings = SETTINGS.model_copy(update={"model": model})
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with group_of_one(CPU) as groups:
            losses.append(train(program_of(settings), groups, num_steps=2).losses)
    assert losses[0] == losses[1]
