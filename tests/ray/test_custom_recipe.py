"""`elastic train` of a custom model, dataset and optimizer, as in docs/custom-model.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import ROOT
from shared_cluster import elastic_train

from elastic.geometry.sample_order import sample_of
from pipelines.run.recipes import load
from pipelines.settings.recipe import Recipe
from pipelines.training.checkpoint.weights import load_weights

EXAMPLE = f"{ROOT}/examples/custom_model.py:recipe"
NUM_STEPS = 40


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_custom_model_example_killed_and_resized_equals_the_plain_loop(tmp_path: Path) -> None:
    arguments = (
        EXAMPLE, "--workers", "1:3", "--steps", str(NUM_STEPS), "--set", "dtype=float64",
        "--inject", "kill worker 0 at step 8", "--inject", "kill worker 1 at step 16",
    )  # fmt: skip
    with elastic_train(tmp_path, *arguments, "--inject", "remove worker 2 at step 24") as command:
        code, output = command.finish()
        metrics = command.metrics()
        held_out_losses = [line["loss"] for line in command.lines("Evaluated")]
        lost = {line["worker"] for line in command.lines("WorkerLost")}
    assert code == 0, output
    assert {"w0", "w1"} <= lost
    losses = [line["loss"] for line in metrics]
    assert losses == pytest.approx(plain_losses(load(EXAMPLE)), rel=1e-9)
    assert len({line["world_size"] for line in metrics}) > 1
    assert held_out_losses[-1] < held_out_losses[0], "the held-out loss falls"
    weights = load_weights(tmp_path / "run")
    assert load(EXAMPLE).model().load_state_dict(weights), (
        "the state dict has exactly the keys of the module"
    )


def plain_losses(recipe: Recipe) -> list[float]:
    torch.set_num_threads(1)  # two threads that wait for each other are slower on a busy machine
    settings, data = recipe.settings, recipe.data()
    torch.manual_seed(settings.seed)
    model = recipe.model().double()
    optimizer = recipe.optimizer(list(model.named_parameters()))
    [lr] = {group["lr"] for group in optimizer.param_groups}
    losses = []
    for step in range(1, NUM_STEPS + 1):
        total_loss = 0.0
        for number in range(settings.num_microbatches):
            first = (step - 1) * settings.batch + number * settings.microbatch
            ids = range(first, first + settings.microbatch)
            batch = [data[sample_of(settings.seed, sample_id, len(data))] for sample_id in ids]
            images = torch.stack([image for image, _ in batch]).double()
            labels = torch.tensor([label for _, label in batch])
            loss = recipe.loss(model, (images, labels)) / settings.num_microbatches
            loss.backward()
            total_loss += loss.item()
        for group in optimizer.param_groups:
            group["lr"] = lr * recipe.schedule(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total_loss)
    return losses
