"""A bare loop for the net of examples/custom_model.py: DistributedDataParallel and SGD.

As a program, under torchrun: `FOLDER BATCH MICROBATCH`; it trains forever.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from mlp import StepLog
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from pipelines.training.workload.sample_order import samples_of


def make_step(custom_model: Any, num_microbatches: int, microbatch: int) -> Callable[[int], float]:
    """A function that trains one step, counted from 1, and returns the mean loss over all ranks.

    The samples are drawn as in our run. A loop that logs its loss has to sum it over the ranks.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(custom_model.Net())
    data = custom_model.Stripes(2048)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    num_local = num_microbatches // dist.get_world_size()
    first = dist.get_rank() * num_local

    def step_of(step: int) -> float:
        total = torch.zeros(())
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, step / 10)
        optimizer.zero_grad()
        begin = ((step - 1) * num_microbatches + first) * microbatch
        samples = samples_of(0, range(begin, begin + num_local * microbatch), len(data))
        for number in range(num_local):
            own = samples[number * microbatch : (number + 1) * microbatch]
            batch = default_collate([data[sample] for sample in own])
            is_last = number == num_local - 1
            with nullcontext() if is_last else model.no_sync():
                loss = custom_model.loss(model, batch) / num_local
                loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        optimizer.step()
        return float(total) / dist.get_world_size()

    return step_of


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, batch, microbatch = Path(sys.argv[1]), *map(int, sys.argv[2:])
    custom_model = SimpleNamespace(
        **runpy.run_path(str(Path(__file__).parents[2] / "examples" / "custom_model.py"))
    )
    step_log = StepLog(folder, dist.get_rank())
    step_of = make_step(custom_model, batch // microbatch, microbatch)
    for step in count(1):
        loss = step_of(step)
        if dist.get_rank() == 0:
            step_log.commit(step, dist.get_world_size(), loss=loss)


if __name__ == "__main__":
    main()
