"""Ray Train's `TorchTrainer` on Gloo with the loop of `torchrun_peace.py`, without checkpoints.

    python ray_train_peace.py FOLDER WORKERS MODEL LOG_EVERY

One CPU more than there are workers is for the trainer's own actors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torchrun_peace


def train(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    recipe = torchrun_peace.make_recipe(settings["model"])
    replica = ray.train.torch.prepare_model(torchrun_peace.make_model(recipe))
    folder, log_every = Path(settings["folder"]), settings["log_every"]
    torchrun_peace.train(folder, recipe, replica, log_every, report)


def report(step: int, loss: float) -> None:
    ray.train.report({"step": step, "loss": loss})


def main() -> None:
    folder, workers, model, log_every = sys.argv[1:]
    ray.init(
        address="local",
        num_cpus=int(workers) + 1,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}},
    )
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"folder": folder, "model": model, "log_every": int(log_every)},
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=int(workers)),
        run_config=ray.train.RunConfig(storage_path=str(Path(folder) / "storage")),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
