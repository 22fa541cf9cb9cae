"""ZeRO stages and offload on one GPU, over NCCL, equal the CPU."""

from __future__ import annotations

from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_groups import separate_hosts
from one_gpu import NEEDS_GPU
from test_replica import local_tensors
from test_zero import MeasuredReplica, Trained, train
from torch.multiprocessing import start_processes

from actors.distributed.backends.backend import backend_of, dissolve_groups, init_world
from actors.distributed.meshes import form_groups
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.zero import STAGES
from pipelines.run.program import TrainingProgram
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings
from pipelines.training.replica.warm_up import group_of_one

pytestmark = NEEDS_GPU

TIMEOUT = timedelta(seconds=60)
SETTINGS = tiny().model_copy(
    update={
        "data": DataSettings(source="random", seq_len=16),
        "dtype": "float64",
        "batch": 8,
        "eval_every": 1,
        "eval_samples": 4,
    }
)
CASES = [(zero, offload) for zero in STAGES for offload in (False, True)]


def program_on(device: str, **changes: Any) -> TrainingProgram:
    settings = SETTINGS.model_copy(update=changes)
    return TrainingProgram(settings.model_dump(mode="json"), device=device)


def run_rank(world_rank: int, folder: Path) -> None:
    """Train all cases in one of two processes."""
    separate_hosts()
    torch.cuda.set_device(0)
    file = dist.FileStore(str(folder / "store"), 2)
    for zero, offload in CASES:
        store = dist.PrefixStore(f"{zero} {offload}", file)
        backend = backend_of("cuda")
        backend.prepare(store, 2, TIMEOUT)
        init_world(backend, store, world_rank, 2, TIMEOUT)
        assignment = Assignment(1, Layout(fsdp=2, zero=zero), ("w0", "w1"))
        program = program_on("cuda", offload=offload)
        groups = form_groups(backend, assignment, world_rank, program.device, TIMEOUT)
        replica = MeasuredReplica(program.workload, program.settings, groups)
        trained = train(program, replica, local_tensors(program, groups))
        if offload:
            assert_on_the_host(replica.state.shards, replica.tensors())
        torch.save(trained._asdict(), folder / f"{zero}-{offload}-{world_rank}.pt")
        dist.barrier()
        dissolve_groups(backend)


def assert_on_the_host(shards: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    assert {tensor.device.type for tensor in tensors.values()} == {"cpu"}
    assert all(shard.is_pinned() for shard in shards.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of two processes."""
    folder = tmp_path_factory.mktemp("zero")
    set_forkserver_preload(["pipelines.run.program"])
    start_processes(run_rank, (folder,), 2, start_method="forkserver")
    return folder


@pytest.fixture(scope="module")
def on_cpu() -> Trained:
    program = program_on("cpu")
    with group_of_one(program.device) as groups:
        replica = MeasuredReplica(program.workload, program.settings, groups)
        return train(program, replica, local_tensors(program, groups))


@pytest.mark.parametrize(("zero", "offload"), CASES)
def test_stages_and_offload_equal_the_cpu(
    folder: Path, on_cpu: Trained, zero: int, offload: bool
) -> None:
    for rank in range(2):
        file = folder / f"{zero}-{offload}-{rank}.pt"
        trained = Trained(**torch.load(file, weights_only=False))
        assert trained.losses == pytest.approx(on_cpu.losses, rel=1e-9)
        assert trained.held_out == pytest.approx(on_cpu.held_out, rel=1e-9)
        sizes = trained.in_step
        if offload:
            assert sizes.optimizer_bytes == sizes.grad_bytes == 0
            param_bytes = on_cpu.in_step.param_bytes if zero < 3 else 0
            assert sizes.param_bytes == param_bytes, "the full parameters below stage 3"
        else:
            assert sizes.optimizer_bytes > 0
