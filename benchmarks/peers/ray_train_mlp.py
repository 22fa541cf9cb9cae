"""Ray Train elastic: DDP on Gloo, 2 to 4 workers, a checkpoint on tmpfs every 10 steps.

    RAY_TRAIN_HEALTH_CHECK_INTERVAL_S=0.1 python ray_train_mlp.py FOLDER

One CPU more than there are workers is for the trainer's own actors.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from mlp import CHECKPOINT_EVERY, MAX_GRAD_NORM, StepLog, loss_of, make_model, make_optimizer
from torch.nn.utils import clip_grad_norm_

NUM_WORKERS = 4


def train(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    context = ray.train.get_context()
    world_rank, world_size = context.get_world_rank(), context.get_world_size()
    step_log = StepLog(Path(settings["folder"]), world_rank)
    model = make_model()
    optimizer = make_optimizer(model)
    begin = 1
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            saved = torch.load(Path(directory) / "checkpoint.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["step"] + 1
    replica = ray.train.torch.prepare_model(model)
    for step in count(begin):
        loss_of(replica, step, world_rank, world_size).backward()
        clip_grad_norm_(replica.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if world_rank == 0:
            step_log.commit(step, world_size)
        if step % CHECKPOINT_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            report(state, world_rank)


def report(state: dict[str, Any], world_rank: int) -> None:
    """Report from all workers, which is a barrier; world rank 0 attaches the checkpoint."""
    if world_rank != 0:
        ray.train.report({"step": state["step"]})
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        torch.save(state, Path(directory) / "checkpoint.pt")
        checkpoint = ray.train.Checkpoint.from_directory(directory)
        ray.train.report({"step": state["step"]}, checkpoint=checkpoint)


def main(folder: Path) -> None:
    ray.init(
        address="local",
        num_cpus=NUM_WORKERS + 1,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}},
    )
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"folder": str(folder)},
        torch_config=ray.train.torch.TorchConfig(backend="gloo", timeout_s=30),
        scaling_config=ray.train.ScalingConfig(
            num_workers=(2, NUM_WORKERS), elastic_resize_monitor_interval_s=1.0
        ),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "storage"),
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
