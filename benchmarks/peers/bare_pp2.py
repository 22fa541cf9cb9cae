"""A bare torchrun + pipelining loop: the model cut in two by hand, torch's 1F1B.

    torchrun --standalone --nproc-per-node 2 bare_pp2.py FOLDER RECIPE

The stages are ours: the first half of the blocks with the embedding, the rest with the head.
"""

from __future__ import annotations

import bare
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def cut(module: nn.Module, stage: int) -> None:
    """Keep one half of the blocks, with the embedding or with the norm and the head."""
    names = list(module.layers)
    middle = len(names) // 2
    for name in names[middle:] if stage == 0 else names[:middle]:
        del module.layers[name]
    if stage == 0:
        module.norm = module.head = None
    else:
        module.embedding = None


def make_step(job: bare.Job) -> bare.StepOf:
    stage, tokens_of_step = dist.get_rank(), 0
    model = bare.make_module(job)
    cut(model, stage)
    optimizer = bare.make_optimizer(model.parameters(), job)

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total / tokens_of_step

    schedule = Schedule1F1B(
        PipelineStage(model, stage, dist.get_world_size(), bare.CPU),
        job.settings.num_microbatches,
        loss_fn=loss_of,
        scale_grads=False,
    )

    def step_of(step: int) -> float:
        nonlocal tokens_of_step
        own = bare.microbatch_inputs(job, step)
        tokens_of_step = bare.num_tokens(job, own)
        names = own[0].keywords
        keywords = {name: torch.cat([fed.keywords[name] for fed in own]) for name in names}
        losses: list[Tensor] = []
        if stage == 0:
            schedule.step(torch.cat([fed.inputs for fed in own]), **keywords)
        else:
            targets = torch.cat([fed.targets for fed in own])
            schedule.step(target=targets, losses=losses, **keywords)
        gradients = [weight.grad for weight in model.parameters()]
        sums = torch.stack([get_total_norm(gradients).square(), sum(losses, torch.zeros(()))])
        dist.all_reduce(sums.detach_())
        bare.set_learning_rate(optimizer, job, step)
        largest = job.settings.optimizer.max_grad_norm
        clip_grads_with_norm_(model.parameters(), largest, sums[0].sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return sums[1].item()

    return step_of


if __name__ == "__main__":
    bare.run(make_step)
