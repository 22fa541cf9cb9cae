"""Statistics by block equal those of the plain loop, under any layout."""

from __future__ import annotations

import gzip
import json
import math
from multiprocessing import set_forkserver_preload
from pathlib import Path

import plain_loop
import pytest
import torch
from expected import expected
from harness import run_in_processes
from ranks import formed_groups, open_file_store
from test_replica import CountCollectives, interrupt_never, local_tensors, program_of
from torch.multiprocessing import start_processes

from actors.runtime.fault_spec import Fault
from actors.runtime.program import Groups
from elastic.geometry.layout import Layout
from elastic.geometry.sample_order import sample_of
from elastic.protocol.votes import Vote
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings
from pipelines.training.replica.warm_up import group_of_one

SETTINGS = tiny().model_copy(
    update={
        "data": DataSettings(source="random", seq_len=16),
        "dtype": "float64",
        "batch": 5,
        "statistics_every": 1,
    }
)
NUM_PROCESSES = 4
LAYOUTS = ("dp=3", "fsdp=2", "tp=2", "cp=2", "pp=2", "pp=2,fsdp=2", "fsdp=3,zero=1")
"""With five microbatches, some ranks get one that is only padding."""


def expected_statistics() -> dict[str, dict[str, float]]:
    """Compute the statistics of step 1 with plain PyTorch."""
    program = program_of(SETTINGS)
    initial_weights = dict(local_tensors(program, one_rank()))
    weights = {
        s.name: initial_weights[s.name].clone() for s in program.specs() if s.kind == "parameter"
    }
    data, seed = program.workload.train, SETTINGS.seed
    batch = data.read(
        [sample_of(seed, sample_id, data.num_samples) for sample_id in range(SETTINGS.batch)]
    )
    model = SETTINGS.model
    plain = plain_loop.Plain(
        model.num_layers, model.num_heads, model.rope_theta, model.norm_eps, (), (), 0.0, 1.0
    )
    for weight in weights.values():
        weight.requires_grad_()
    logits, _ = plain_loop.logits(plain, weights, batch.tokens)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
    _, final_weights = expected(SETTINGS, 1)
    statistics: dict[str, dict[str, float]] = {}
    for group in ("layers.0", "layers.1", "embedding", "norm", "head"):
        names = [name for name in weights if name.startswith(f"{group}.")]
        param = norm_of(final_weights[name].detach() for name in names)
        update = norm_of(final_weights[name].detach() - initial_weights[name] for name in names)
        statistics[group] = {
            "grad_norm": norm_of(weights[name].grad for name in names),
            "param_norm": param,
            "update_norm": update,
            "update_ratio": update / param,
        }
    x = weights["embedding.weight"][batch.tokens]
    for i in range(model.num_layers):
        layer = {name.removeprefix(f"layers.{i}."): value for name, value in weights.items()}
        y = plain_loop.norm(plain, x, layer["attention_norm.weight"])
        x = x + plain_loop.attention(plain, layer, y)
        y = plain_loop.norm(plain, x, layer["feed_forward_norm.weight"])
        x = x + plain_loop.swiglu(y, *(layer[f"feed_forward.w{n}.weight"] for n in (1, 2, 3)))
        statistics[f"layers.{i}"] |= {
            "activation_mean": x.mean().item(),
            "activation_rms": x.square().mean().sqrt().item(),
            "activation_zeros": 0.0,
            "activation_nonfinite": 0.0,
        }
    return statistics


def norm_of(tensors) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def one_rank():
    """The attributes of `Groups` that determine what the only rank holds."""

    class OneRank:
        world_rank = 0

        class assignment:
            layout = Layout()

    return OneRank


def first_step(groups: Groups) -> tuple[dict[str, dict[str, float]], int]:
    """Return the statistics of step 1, and the number of collectives in apply."""
    program = program_of(SETTINGS)
    replica = program.build(groups)
    replica.adopt(local_tensors(program, groups))
    sums = replica.compute(1, interrupt_never)
    torch.distributed.all_reduce(sums)
    loss_sum, num_tokens, sq_grad_norm = sums.tolist()
    with CountCollectives() as in_apply:
        replica.apply(1, Vote(1, loss_sum, int(num_tokens), sq_grad_norm, 1))
    statistics = replica.statistics()
    assert replica.statistics() is None, "a step is reported once"
    return statistics, in_apply.num_collectives


def assert_equal(
    actual: dict[str, dict[str, float]], expected_values: dict[str, dict[str, float]]
) -> None:
    assert set(actual) == set(expected_values)
    for group, numbers in expected_values.items():
        assert actual[group] == pytest.approx(numbers, rel=1e-7, abs=1e-15), group


def test_statistics_of_one_rank_equal_the_plain_loop() -> None:
    with group_of_one(torch.device("cpu")) as groups:
        statistics, num_collectives = first_step(groups)
    assert_equal(statistics, expected_statistics())
    assert num_collectives == 0


def run_rank(world_rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = open_file_store(folder, NUM_PROCESSES)
    for name in LAYOUTS:
        layout = Layout.parse(name)
        if world_rank < layout.num_workers:
            with formed_groups(layout, store, name, world_rank) as groups:
                result = first_step(groups)
            (folder / f"{name}-{world_rank}.json").write_text(json.dumps(result))


@pytest.mark.slow
def test_statistics_are_equal_under_every_layout(tmp_path: Path) -> None:
    set_forkserver_preload(["pipelines.run.program"])
    start_processes(run_rank, (tmp_path,), NUM_PROCESSES, start_method="forkserver")
    expected_values = expected_statistics()
    for name in LAYOUTS:
        for rank in range(Layout.parse(name).num_workers):
            statistics, num_collectives = json.loads((tmp_path / f"{name}-{rank}.json").read_text())
            assert_equal(statistics, expected_values)
            assert num_collectives == 0


@pytest.mark.slow
def test_killed_run_reports_each_due_step_and_keeps_its_traces(tmp_path: Path) -> None:
    """The kill is within the traced steps; the survivor keeps its trace."""
    settings = SETTINGS.model_copy(update={"steps": 14, "batch": 6, "statistics_every": 4})
    faults = (Fault("kill", "w0", 6, "compute"),)
    run = run_in_processes(tmp_path, settings, 2, faults=faults, profiled=(4, 9))
    assert run.stopped.outcome == "completed"
    lines = [json.loads(line) for line in (tmp_path / "statistics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8, 12]
    norms = {line["step"]: line["grad_norm"] for line in run.metrics}
    for line in lines:
        squares = sum(group["grad_norm"] ** 2 for group in line["groups"].values())
        assert math.sqrt(squares) == pytest.approx(norms[line["step"]], rel=1e-9)
    traces = {file.name: file for file in (tmp_path / "profiles").iterdir()}
    assert "w1-g1-steps-4-9.json.gz" in traces, "the survivor continues its trace"
    assert not any(name.startswith("w0-g1") for name in traces), (
        "the trace of a killed worker is lost"
    )
    events = json.loads(gzip.decompress(traces["w1-g1-steps-4-9.json.gz"].read_bytes()))
    marks = [event["name"] for event in events["traceEvents"] if event["name"].startswith("step ")]
    assert set(marks) == {f"step {number}" for number in range(4, 10)}
