"""Training of `transformers` models in several processes, compared with a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import models_on_disk  # offline, before transformers is imported
import plain_causal_lm
import pytest
import torch
from ranks import formed_groups, open_file_store
from test_replica import Trained, program_of, train

from elastic.geometry.layout import Layout
from elastic.geometry.sample_order import keyed_seed, microbatch_seed, sample_of
from elastic.geometry.shard_map import region_of
from pipelines.data.windows import Samples
from pipelines.hugging_face.causal_lm import positions_of
from pipelines.run.recipes import load
from pipelines.settings import DataSettings, TrainSettings
from pipelines.training.workload.optimizer import learning_rate

NUM_STEPS, BATCH = 3, 6


class Case(NamedTuple):
    """A model and the layout under which it is trained."""

    model: str
    layout: str
    microbatch: int = 1
    attends_across_documents: bool = False
    rel: float = 1e-9
    atol: float = 1e-12

    @property
    def name(self) -> str:
        return f"{self.model} {self.layout}"

    def settings(self, folder: Path) -> TrainSettings:
        """The settings of the run; the folder has the model."""
        data = DataSettings(
            source="random", seq_len=16, attend_across_documents=self.attends_across_documents
        )
        return settings_for(folder / self.model, microbatch=self.microbatch, data=data)


def settings_for(model_folder: Path, **changes: object) -> TrainSettings:
    return load(f"hf:{model_folder}").model_copy(
        update={
            "data": DataSettings(source="random", seq_len=16),
            "dtype": "float64",
            "batch": BATCH,
            "eval_every": 1,
            "eval_samples": 3,
            **changes,
        }
    )


def train_plain_model(
    settings: TrainSettings, num_steps: int
) -> tuple[list[tuple[float, float]], dict]:
    """Train the model with plain `transformers` on the same samples."""
    model, optimizer = plain_causal_lm.load(settings.init_from), settings.optimizer
    seed_layers(model, settings)
    data = program_of(settings).workload.train
    losses_and_norms = plain_causal_lm.train(
        model,
        plain_batches(settings, data, num_steps),
        [learning_rate(optimizer, step) for step in range(1, num_steps + 1)],
        (optimizer.beta1, optimizer.beta2),
        optimizer.weight_decay,
        optimizer.max_grad_norm,
    )
    return losses_and_norms, model.state_dict()


def seed_layers(model: torch.nn.Module, settings: TrainSettings) -> None:
    """Seed in each layer of a Llama that draws random numbers, by its number behind the embedding
    and by the microbatch, which is the whole batch of a step."""
    num_steps = 0

    def begin(*ignored: object) -> None:
        nonlocal num_steps
        num_steps += 1

    def enter(number: int, *ignored: object) -> None:
        seed = microbatch_seed(settings.seed, num_steps, 0)
        torch.manual_seed(keyed_seed("block", seed, number))

    if getattr(model.config, "attention_dropout", 0):
        model.register_forward_pre_hook(begin)
        for number, layer in enumerate(model.model.layers, start=1):
            layer.register_forward_pre_hook(partial(enter, number))


def plain_batches(settings: TrainSettings, data: Samples, num_steps: int) -> Iterator[tuple]:
    """The batch of each step."""
    for step in range(num_steps):
        ids = range(step * settings.batch, (step + 1) * settings.batch)
        batch = data.read(
            [sample_of(settings.seed, sample_id, data.num_samples) for sample_id in ids]
        )
        positions = None if batch.documents is None else positions_of(batch.documents)
        yield batch.tokens, batch.targets, positions


def run_rank(world_rank: int, folder: Path, cases: list[Case], num_processes: int) -> None:
    """The work of one process: train each case that has its rank."""
    torch.set_num_threads(1)
    store = open_file_store(folder, num_processes)
    for case in cases:
        layout = Layout.parse(case.layout)
        if world_rank >= layout.num_workers:
            continue
        program = program_of(case.settings(folder))
        has_experts = any(spec.ep_dim is not None for spec in program.specs())
        with formed_groups(layout, store, case.name, world_rank, has_experts) as groups:
            trained = train(program, groups, NUM_STEPS)
        torch.save(trained._asdict(), folder / f"{case.name}-{world_rank}.pt")


def assert_equals_plain_loop(folder: Path, case: Case) -> None:
    """The losses and weights of all ranks are those of a plain loop of `transformers`."""
    layout, settings = Layout.parse(case.layout), case.settings(folder)
    ranks = [
        Trained(**torch.load(folder / f"{case.name}-{rank}.pt", weights_only=False))
        for rank in range(layout.num_workers)
    ]
    losses_and_norms, weights = train_plain_model(settings, NUM_STEPS)
    losses, norms = zip(*losses_and_norms, strict=True)
    for trained in ranks:
        assert trained.losses == pytest.approx(losses, rel=case.rel)
        assert trained.norms == pytest.approx(norms, rel=case.rel)
        assert trained.num_collectives_in_apply == 0
    for spec in program_of(settings).specs():
        for rank, trained in enumerate(ranks) if spec.kind == "parameter" else ():
            region = region_of(spec, layout, layout.coordinates(rank))
            assert (spec.name in trained.tensors) == (region is not None)
            if region is not None:
                expected_region = models_on_disk.slice_region(weights[spec.name], region)
                torch.testing.assert_close(
                    trained.tensors[spec.name], expected_region, rtol=case.rel, atol=case.atol
                )
