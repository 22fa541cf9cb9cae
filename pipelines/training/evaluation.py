"""The mean loss over the held-out split: bit for bit the same under any layout."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from actors.program import Groups
from pipelines.settings import TrainSettings
from pipelines.training.share import Share
from pipelines.training.workload import Workload


@torch.no_grad()
def evaluate(
    module: nn.Module,
    workload: Workload,
    settings: TrainSettings,
    share: Share,
    groups: Groups,
) -> float:
    """The mean loss per token over the first `eval_samples` held-out samples.

    The samples are cut into fixed microbatches; each is summed by one rank, and the sums are
    gathered as a vector in which every other rank adds 0, which is exact. So neither the
    layout nor the order of a reduction can change the value.
    """
    num_samples = min(settings.eval_samples, workload.num_held_out)
    starts = range(0, num_samples, settings.microbatch)
    sums = torch.zeros(2, len(starts), dtype=torch.float64, device=groups.device)
    module.eval()
    for microbatch in share.rounds(len(starts)):
        if microbatch is None:
            workload.loss(module, workload.empty(), groups.device)
            continue
        first = starts[microbatch]
        samples = range(first, min(first + settings.microbatch, num_samples))
        batch = workload.read(samples, held_out=True)
        sums[0, microbatch] = workload.loss(module, batch, groups.device)
        sums[1, microbatch] = workload.num_tokens(batch)
    module.train()
    _reshard(module)
    dist.all_reduce(sums, group=groups.world)
    losses, tokens = sums.tolist()
    return math.fsum(losses) / math.fsum(tokens)


def _reshard(module: nn.Module) -> None:
    # Without a backward pass nothing else lets go of the gathered parameters.
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
