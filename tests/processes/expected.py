"""The training that the plain loop does: losses, gradient norms and final weights."""

from __future__ import annotations

from functools import cache

import plain_loop
import torch

from elastic.geometry.layout import Layout
from elastic.geometry.sample_order import sample_of
from elastic.geometry.shard_map import region_of
from pipelines.run.program import TrainingProgram
from pipelines.settings import TrainSettings
from pipelines.training.workload.optimizer import learning_rate


@cache
def expected(
    settings: TrainSettings,
    num_steps: int,
    skipped_steps: tuple[int, ...] = (),
    skipped_batches: tuple[int, ...] = (),
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Train in this process, from the same initial weights on the same samples.

    The steps `skipped_steps` change nothing; no step reads the batches `skipped_batches`.
    """
    program = TrainingProgram(settings.model_dump(mode="json"), device="cpu")
    model, data, optimizer = settings.model, program.workload.train, settings.optimizer
    plain = plain_loop.Plain(
        model.num_layers,
        model.num_heads,
        model.rope_theta,
        model.norm_eps,
        tuple(learning_rate(optimizer, step) for step in range(1, num_steps + 1)),
        (optimizer.beta1, optimizer.beta2),
        optimizer.weight_decay,
        optimizer.max_grad_norm,
        settings.microbatch,
        model.experts.top_k if model.experts else 0,
        model.experts.balance_coefficient if model.experts else 0.0,
    )
    weights = {
        spec.name: program.initial(spec, region_of(spec, Layout(), Layout().coordinates(0)))
        for spec in program.specs()
        if spec.kind == "parameter"
    }
    batches = []
    batch_numbers = [n for n in range(num_steps + len(skipped_batches)) if n not in skipped_batches]
    for step, number in enumerate(batch_numbers[:num_steps], start=1):
        if step in skipped_steps:
            batches.append(None)
            continue
        ids = range(number * settings.batch, (number + 1) * settings.batch)
        batch = data.read(
            [sample_of(settings.seed, sample_id, data.num_samples) for sample_id in ids]
        )
        batches.append((batch.tokens, batch.targets))
    return plain_loop.train(plain, weights, batches), weights
