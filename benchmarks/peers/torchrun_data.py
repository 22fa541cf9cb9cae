"""The loop of `torchrun_peace.py` with a `DataLoader` for a recipe of `data_models.py`.

    torchrun torchrun_data.py FOLDER MODEL

It trains forever, with the samples of our run in their order.
"""

from __future__ import annotations

import sys
from pathlib import Path

import data_models
import torch
import torch.distributed as dist
from mlp import StepLog
from own_samples import own_samples
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from pipelines.settings.recipe import Recipe


def main() -> None:
    folder, name = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    recipe: Recipe = getattr(data_models, name)()
    torch.manual_seed(recipe.settings.seed)
    replica = DistributedDataParallel(recipe.model())
    optimizer = recipe.optimizer(list(replica.named_parameters()))
    data = recipe.data()
    loader = DataLoader(
        data,
        batch_sampler=own_samples(recipe, len(data)),
        num_workers=recipe.settings.reading.num_readers,
    )
    step_log = StepLog(Path(folder), dist.get_rank())
    for step, inputs in enumerate(loader, start=1):
        mean_loss = recipe.loss(replica, inputs).mean()
        optimizer.zero_grad()
        mean_loss.backward()
        clip_grad_norm_(replica.parameters(), recipe.max_grad_norm)
        optimizer.step()
        if dist.get_rank() == 0:
            step_log.commit(step, dist.get_world_size(), loss=float(mean_loss.detach()))


if __name__ == "__main__":
    main()
