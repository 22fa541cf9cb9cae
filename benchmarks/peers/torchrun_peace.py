"""A plain training loop for a recipe of `peace_models.py`; as a program, DDP under torchrun.

    torchrun torchrun_peace.py FOLDER MODEL LOG_EVERY

It trains forever. Each rank computes its share of the batch in one pass. The mean loss over the
ranks is reduced and reported every LOG_EVERY steps, and in the first steps, whose losses are
compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import peace_models
import torch
import torch.distributed as dist
from mlp import StepLog
from own_samples import own_samples
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import default_collate

from pipelines.settings.recipe import Recipe

NUM_COMPARED = 10
"""The first steps, whose losses the benchmark compares."""
Report = Callable[[int, float], None]
"""Reports a step and its loss, on each rank."""


def make_recipe(name: str) -> Recipe:
    return getattr(peace_models, name)()


def make_model(recipe: Recipe) -> nn.Module:
    """The model with the initial values of our run."""
    torch.manual_seed(recipe.settings.seed)
    return recipe.model()


def make_step(recipe: Recipe, replica: nn.Module) -> Callable[[], Tensor]:
    """A function that trains the next step and returns the mean loss of this rank.

    The samples of a step are those of our run.
    """
    data = recipe.data()
    optimizer = recipe.optimizer(list(replica.named_parameters()))
    samples = own_samples(recipe, len(data))

    def train_step() -> Tensor:
        batch = default_collate([data[sample] for sample in next(samples)])
        losses = recipe.loss(replica, batch)
        loss = losses[0] / losses[1] if isinstance(losses, tuple) else losses.mean()
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(replica.parameters(), recipe.max_grad_norm)
        optimizer.step()
        return loss.detach()

    return train_step


def train(folder: Path, recipe: Recipe, replica: nn.Module, log_every: int, report: Report) -> None:
    """Train forever; the process group exists."""
    step_log = StepLog(folder, dist.get_rank())
    train_step = make_step(recipe, replica)
    for step in count(1):
        loss = train_step()
        mean_loss = None
        if step <= NUM_COMPARED or step % log_every == 0:
            dist.all_reduce(loss)
            mean_loss = float(loss) / dist.get_world_size()
        if dist.get_rank() == 0:
            step_log.commit(step, dist.get_world_size(), loss=mean_loss)
        if mean_loss is not None and step % log_every == 0:
            report(step, mean_loss)


def print_loss(step: int, loss: float) -> None:
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss:.4f}")


def main() -> None:
    folder, model, log_every = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    recipe = make_recipe(model)
    replica = DistributedDataParallel(make_model(recipe))
    train(Path(folder), recipe, replica, int(log_every), print_loss)


if __name__ == "__main__":
    main()
