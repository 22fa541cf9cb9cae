"""Whole runs in plain processes, without Ray: what snapshots, checkpoints and kills cost.

One worker a GPU; on a machine with one GPU two workers share it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from io import TextIOWrapper
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import torch
from gpu_groups import separate_hosts
from plain_run import plain_run

from pipelines.run.program import TrainingProgram

START_TIMEOUT_S = 300.0
RECOVERY_TIMEOUT_S = 120.0
NUM_STEPS = 60
CHECKPOINT_EVERY = 20
LARGE = (
    "model.dim=1024", "model.num_layers=12", "model.num_heads=16", "model.num_kv_heads=16",
    "model.hidden_dim=2816", "dtype=bfloat16", "data.seq_len=1024", "batch=16", "microbatch=2",
)  # fmt: skip
"""150 M parameters: their state fits twice on one GPU, and in host memory."""
PLAIN = ("eval_every=0",)
_claims: list[TextIOWrapper] = []


def on_gpu(**kwargs: Any) -> TrainingProgram:
    """The training program of a worker on a GPU that no other worker has, or on a shared one."""
    folder = Path(gettempdir()) / f"elastic-gpu-claims-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    num_gpus = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(index) for index in range(num_gpus)]
    for name in names:
        claim = (folder / name).open("w")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            claim.close()
            continue
        _claims.append(claim)  # the lock ends with this process
        os.environ["CUDA_VISIBLE_DEVICES"] = name  # for all threads, as Ray does
        break
    if num_gpus == 1:
        separate_hosts()
    return TrainingProgram(**kwargs, device="cuda")


def on_cpu(**kwargs: Any) -> TrainingProgram:
    return TrainingProgram(**kwargs, device="cpu")


def measure_stalls(device: str, changes: tuple[str, ...]) -> dict[str, float]:
    """The median seconds of a step of one worker without and with a snapshot of each step, and
    what a step takes longer while a checkpoint begins."""
    without = _step_times(device, (*changes, "snapshot.every=0", "checkpoint.every=0"))
    every = f"checkpoint.every={CHECKPOINT_EVERY}"
    copying = _step_times(device, (*changes, "snapshot.every=1", every))
    begins = {step: s for step, s in copying.items() if step % CHECKPOINT_EVERY == 1}
    others = [s for step, s in copying.items() if step not in begins]
    return {
        "without_copies_s": median(without.values()),
        "with_snapshots_s": median(others),
        "checkpoint_stall_s": max(0.0, median(begins.values()) - median(others)),
    }


def measure_kills(device: str, changes: tuple[str, ...], num_kills: int) -> dict[str, float]:
    """Kill workers one after the other, each once its replacement trains; the seconds from a kill
    to the next committed step, and how many survivors were lost."""
    size = max(2, torch.cuda.device_count()) if device == "cuda" else 2
    changes = (*changes, *PLAIN, "checkpoint.every=0")
    recoveries_s: list[float] = []
    killed: list[str] = []
    with TemporaryDirectory() as folder, _run(Path(folder), device, f"dp={size}", changes) as run:
        for _ in range(num_kills):
            run.wait_for_world(size, 5, START_TIMEOUT_S)
            victim = run.members()[-1]
            killed_at = time.time()
            os.kill(run.pid(victim), signal.SIGKILL)
            killed.append(victim)
            generation = run.metrics[-1]["generation"]

            def has_recovered(generation: int = generation) -> bool:
                return bool(run.metrics[-1]["generation"] > generation)

            run.wait_until(has_recovered, RECOVERY_TIMEOUT_S, "the step after a kill")
            first = next(line for line in run.metrics if line["generation"] > generation)
            recoveries_s.append(first["time"] - killed_at)
        lost = [line["worker"] for line in run.lines_of("WorkerLost")]
    return {
        "num_workers": size,
        "num_kills": num_kills,
        "recovery_s": median(recoveries_s),
        "slowest_recovery_s": max(recoveries_s),
        "num_survivors_lost": len(set(lost) - set(killed)),
    }


def _step_times(device: str, changes: tuple[str, ...]) -> dict[int, float]:
    """The seconds of each step of one worker, without the first quarter."""
    changes = (*changes, *PLAIN)
    with TemporaryDirectory() as folder, _run(Path(folder), device, "dp=1", changes) as run:
        run.wait_for_world(1, NUM_STEPS, START_TIMEOUT_S)
        return {line["step"]: line["step_s"] for line in run.metrics[NUM_STEPS // 4 : NUM_STEPS]}


def _run(folder: Path, device: str, layout: str, changes: tuple[str, ...]) -> Any:
    program = f"gpu_runs:{'on_gpu' if device == 'cuda' else 'on_cpu'}"
    environment = {} if device == "cpu" else {"OMP_NUM_THREADS": "4"}
    return plain_run(folder, "byte_lm", layout, 1, changes, program, environment)
