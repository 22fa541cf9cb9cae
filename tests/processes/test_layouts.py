"""Every axis alone, and combinations of axes, equal the plain loop in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from expected import expected
from ranks import formed_groups, open_file_store
from test_replica import Trained, program_of, train
from torch.multiprocessing import start_processes

from elastic.geometry.layout import Layout
from elastic.geometry.shard_map import bytes_held, region_of
from elastic.geometry.tensor_specs import TensorSpec
from elastic.geometry.zero import divides
from pipelines.run.recipes import tiny, tiny_moe
from pipelines.settings import DataSettings, TrainSettings

NUM_STEPS = 3
NUM_PROCESSES = 8
COMMON = {
    "data": DataSettings(source="random", seq_len=16),
    "dtype": "float64",
    "batch": 5,
    "eval_every": 1,
    "eval_samples": 3,
    "sync_each_microbatch": True,
}
DENSE = tiny().model_copy(update=COMMON)
MIXED = tiny_moe().model_copy(update=COMMON)


class Case(NamedTuple):
    """A layout and its settings."""

    layout: str
    settings: TrainSettings = DENSE

    @property
    def name(self) -> str:
        model = "experts" if self.settings.model.experts else "dense"
        recomputed = self.settings.activation_checkpointing
        return f"{self.layout} {model} {self.settings.dtype} {self.settings.schedule} {recomputed}"


def with_settings(settings: TrainSettings, **changes: object) -> TrainSettings:
    return settings.model_copy(update=changes)


PAIRS = {"batch": 6, "microbatch": 2}

EACH_AXIS = [
    Case("tp=2"),
    Case("fsdp=2,tp=2", with_settings(DENSE, dtype="float32")),
    Case("cp=3", with_settings(DENSE, data=DataSettings(source="random", seq_len=13))),
    Case("pp=2"),
    Case("pp=2,vp=2", with_settings(DENSE, schedule="interleaved_1f1b")),
    Case("pp=2", with_settings(DENSE, schedule="zero_bubble")),
    Case("fsdp=2,zero=1"),
    Case("fsdp=2,zero=2"),
    Case("fsdp=2,ep=2", MIXED),
    Case("fsdp=2,ep=2", with_settings(MIXED, activation_checkpointing="selective")),
    Case("pp=2,fsdp=2,tp=2", with_settings(DENSE, **PAIRS)),
    Case("pp=2,cp=2,tp=2", with_settings(DENSE, activation_checkpointing="selective")),
]
COMBINATIONS = [
    Case("dp=2,tp=2"),
    Case("dp=2,fsdp=2,tp=2"),
    Case("cp=2", with_settings(DENSE, dtype="float32")),
    Case("cp=2,tp=2", with_settings(DENSE, data=DataSettings(source="random", seq_len=12))),
    Case(
        "tp=2,fsdp=3",
        with_settings(DENSE, model=DENSE.model.model_copy(update={"vocab_size": 259})),
    ),
    Case("dp=2,fsdp=2,cp=2"),
    Case("pp=2", with_settings(DENSE, schedule="gpipe")),
    Case("pp=3,dp=2"),
    Case("pp=4", with_settings(DENSE, dtype="float32")),
    Case("pp=2,dp=2", with_settings(DENSE, schedule="interleaved_1f1b")),
    Case("pp=2,vp=2,fsdp=2", with_settings(DENSE, schedule="zero_bubble")),
    Case("pp=2,fsdp=2"),
    Case("pp=2,dp=2,tp=2"),
    Case("pp=2,cp=2,tp=2"),
    Case("pp=2,fsdp=2,cp=2"),
    Case("fsdp=2,cp=2,tp=2"),
    Case("fsdp=2,zero=0"),
    Case("dp=2", MIXED),
    Case("dp=2,fsdp=2,ep=2", MIXED),
    Case("tp=2", MIXED),
    Case("tp=2,ep=2", MIXED),
    Case("cp=2,ep=2", MIXED),
    Case("fsdp=2,cp=2,tp=2,ep=4", MIXED),
    Case("pp=2,fsdp=2,tp=2,ep=2", MIXED),
    Case("pp=2,fsdp=2,ep=2", with_settings(MIXED, schedule="zero_bubble", **PAIRS)),
    Case("dp=2,fsdp=2,zero=1"),
    Case("dp=2,zero=2"),
    Case("fsdp=3,zero=2"),
    Case("fsdp=5,zero=1"),
    Case("fsdp=2,tp=2,zero=1"),
    Case("fsdp=2,tp=2,zero=2"),
    Case("fsdp=2,cp=2,zero=2"),
    Case("pp=2,fsdp=2,zero=1"),
    Case("pp=2,fsdp=2,zero=2"),
    Case("pp=2,vp=2,fsdp=2,zero=2", with_settings(DENSE, schedule="zero_bubble")),
    Case("fsdp=2,ep=2,zero=1", MIXED),
    Case("fsdp=2,ep=2,zero=2", MIXED),
    Case("fsdp=2,cp=2,tp=2,ep=2,zero=2", MIXED),
]

IN_CI = [
    case
    for case in COMBINATIONS
    if case.layout
    in (
        "cp=2,tp=2",
        "pp=2",
        "tp=2,fsdp=3",
        "pp=2,vp=2,fsdp=2",
        "pp=2,fsdp=2,cp=2",
        "fsdp=2,zero=0",
        "tp=2,ep=2",
        "fsdp=2,cp=2,tp=2,ep=4",
        "fsdp=5,zero=1",
        "pp=2,vp=2,fsdp=2,zero=2",
        "fsdp=2,cp=2,tp=2,ep=2,zero=2",
    )
]
"""Each axis, stage and schedule in at least one case; `make soak` trains the others."""


def run_rank(world_rank: int, folder: Path, cases: list[Case]) -> None:
    """Train each case that has this rank."""
    torch.set_num_threads(1)
    store = open_file_store(folder, NUM_PROCESSES)
    for case in cases:
        layout = Layout.parse(case.layout)
        if world_rank >= layout.num_workers:
            continue
        program = program_of(case.settings)
        has_experts = any(spec.ep_dim is not None for spec in program.specs())
        with formed_groups(layout, store, case.name, world_rank, has_experts) as groups:
            trained = train(program, groups, NUM_STEPS)
        torch.save(trained._asdict(), folder / f"{case.name}-{world_rank}.pt")


def train_cases(folder: Path, cases: list[Case]) -> Path:
    set_forkserver_preload(["pipelines.run.program"])
    start_processes(run_rank, (folder, cases), NUM_PROCESSES, start_method="forkserver")
    return folder


@pytest.fixture(scope="module")
def each_axis(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_cases(tmp_path_factory.mktemp("each"), EACH_AXIS)


@pytest.fixture(scope="module")
def combined_axes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of the selected cases."""
    selected = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and "combined_axes" in item.fixturenames
    ]
    return train_cases(tmp_path_factory.mktemp("combined"), selected)


@pytest.mark.parametrize("case", EACH_AXIS, ids=lambda case: case.name)
def test_each_axis_equals_the_plain_loop(each_axis: Path, case: Case) -> None:
    assert_equals_plain_loop(each_axis, case)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=case.name, marks=pytest.mark.slow if case in IN_CI else pytest.mark.soak
        )
        for case in COMBINATIONS
    ],
)
def test_combined_axes_equal_the_plain_loop(combined_axes: Path, case: Case) -> None:
    assert_equals_plain_loop(combined_axes, case)


def assert_equals_plain_loop(folder: Path, case: Case) -> None:
    layout, tolerance = Layout.parse(case.layout), {"float64": 1e-9, "float32": 1e-5}
    ranks = [
        Trained(**torch.load(folder / f"{case.name}-{rank}.pt", weights_only=False))
        for rank in range(layout.num_workers)
    ]
    losses_and_norms, weights = expected(case.settings, NUM_STEPS)
    losses, norms = zip(*losses_and_norms, strict=True)
    rel = tolerance[case.settings.dtype]
    # Adam divides by the root of the second moment: for gradients close to 0 their last bits
    # decide the sign of a full step.
    weights_atol = 1e-12 if rel < 1e-8 else NUM_STEPS * case.settings.optimizer.lr
    for trained in ranks:
        assert trained.losses == pytest.approx(losses, rel=rel)
        assert trained.norms == pytest.approx(norms, rel=rel)
        assert trained.held_out == pytest.approx(ranks[0].held_out, rel=rel)
        assert trained.num_collectives_in_apply == 0
    specs = program_of(case.settings).specs()
    for spec in specs:
        if spec.kind != "parameter":
            continue
        for rank, trained in enumerate(ranks):
            region = region_of(spec, layout, layout.coordinates(rank))
            assert (spec.name in trained.tensors) == (region is not None)
            if region is not None:
                index = tuple(
                    slice(first, first + size)
                    for first, size in zip(region.offsets, region.shape, strict=True)
                )
                expected_region = weights[spec.name].detach()[index]
                torch.testing.assert_close(
                    trained.tensors[spec.name], expected_region, rtol=rel, atol=weights_atol
                )
    expected_bytes = [bytes_computed_with(specs, layout, rank) for rank in range(len(ranks))]
    max_bytes = max(expected_bytes)  # uneven shards are padded to the longest
    for rank_bytes, trained in zip(expected_bytes, ranks, strict=True):
        measured_bytes = trained.sizes.param_bytes + trained.sizes.optimizer_bytes
        assert (
            0.95 * rank_bytes
            <= measured_bytes
            <= 1.05 * max(rank_bytes, max_bytes if layout.pp == 1 else rank_bytes)
        )


def bytes_computed_with(specs: Sequence[TensorSpec], layout: Layout, world_rank: int) -> int:
    """The bytes of the state: at stages 1 and 2 a worker has the full parameters."""
    coordinates = layout.coordinates(world_rank)
    parameters = [spec for spec in specs if spec.kind == "parameter"]
    others = [spec for spec in specs if spec.kind != "parameter"]
    param_layout = layout if divides(layout.zero, "parameters") else replace(layout, zero=0)
    return bytes_held(parameters, param_layout, coordinates) + bytes_held(
        others, layout, coordinates
    )
