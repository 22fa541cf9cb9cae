"""One worker's training on the GPU equals that on the CPU."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from one_gpu import NEEDS_GPU

from actors.runtime.program import StateBytes
from elastic.geometry.regions import Region
from elastic.protocol.votes import Vote
from pipelines.run.program import TrainingProgram
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings, OptimizerSettings, TrainSettings
from pipelines.training.replica.warm_up import group_of_one
from pipelines.training.workload.optimizer import AdamWBySettings, LocalOptimizer, state_templates

pytestmark = NEEDS_GPU

DEVICE = "cuda"
NUM_STEPS = 10
SETTINGS = tiny().model_copy(
    update={"data": DataSettings(source="random", seq_len=16), "eval_every": 1, "eval_samples": 3}
)
IN_FLOAT64 = SETTINGS.model_copy(update={"dtype": "float64"})


class Trained(NamedTuple):
    """The results of a replica."""

    losses: list[float]
    held_out: float
    tensors: dict[str, torch.Tensor]
    sizes: StateBytes


def interrupt_never() -> None:
    """The `interrupt` that never raises."""


def train(settings: TrainSettings, device: str) -> Trained:
    program = TrainingProgram(settings.model_dump(mode="json"), device=device)
    with group_of_one(program.device) as groups:
        replica = program.build(groups)
        specs = program.specs()
        replica.adopt({s.name: program.initial(s, Region.whole(s.shape)) for s in specs})
        losses = []
        for step in range(1, NUM_STEPS + 1):
            loss_sum, num_tokens, sq_grad_norm = replica.compute(step, interrupt_never).tolist()
            replica.apply(step, Vote(step, loss_sum, int(num_tokens), sq_grad_norm, 1))
            losses.append(loss_sum / num_tokens)
        held_out = replica.evaluate(NUM_STEPS, interrupt_never).loss
        tensors = {name: tensor.cpu().clone() for name, tensor in replica.tensors().items()}
        assert {tensor.device.type for tensor in replica.tensors().values()} == {device}
        return Trained(losses, held_out, tensors, replica.state_bytes())


@pytest.mark.parametrize(
    ("settings", "tolerance"), [(IN_FLOAT64, 1e-9), (SETTINGS, 1e-5)], ids=["float64", "float32"]
)
def test_training_on_the_gpu_equals_the_cpu(settings: TrainSettings, tolerance: float) -> None:
    actual, expected = train(settings, DEVICE), train(settings, "cpu")
    assert actual.losses == pytest.approx(expected.losses, rel=tolerance)
    assert actual.held_out == pytest.approx(expected.held_out, rel=tolerance)
    assert actual.sizes == expected.sizes
    for name, tensor in expected.tensors.items():
        scale = tensor.double().abs().max().item()
        error = (actual.tensors[name].double() - tensor.double()).abs().max().item()
        assert error <= 100 * tolerance * max(scale, 1e-3), name


def test_activation_checkpointing_changes_no_loss() -> None:
    recomputing = IN_FLOAT64.model_copy(update={"activation_checkpointing": "full"})
    assert train(recomputing, DEVICE).losses == pytest.approx(
        train(IN_FLOAT64, DEVICE).losses, rel=1e-12
    )


def test_bfloat16_keeps_parameters_in_float32_and_similar_losses() -> None:
    mixed = train(SETTINGS.model_copy(update={"dtype": "bfloat16"}), DEVICE)
    assert {tensor.dtype for tensor in mixed.tensors.values()} == {torch.float32}
    assert mixed.losses == pytest.approx(train(SETTINGS, DEVICE).losses, rel=0.02)


def test_fused_optimizer_on_the_gpu_equals_the_cpu() -> None:
    settings = OptimizerSettings(weight_decay=0.3, warmup_steps=8)
    optimizer_factory = AdamWBySettings(settings)
    template = state_templates(optimizer_factory, {"shard": 2}, torch.float64)["shard"]
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(64, 32, dtype=torch.float64, generator=generator)
    gradients = torch.randn(8, 64, 32, dtype=torch.float64, generator=generator)
    results = {}
    for device in (DEVICE, "cpu"):
        shard = start.to(device, copy=True)
        state = {
            key: torch.zeros(shard.shape if value.ndim else (), dtype=value.dtype, device=device)
            for key, value in template.items()
        }
        optimizer = LocalOptimizer(optimizer_factory, {"shard": shard}, {"shard": state})
        assert optimizer.optimizer.defaults["fused"]
        for step, gradient in enumerate(gradients, start=1):
            optimizer.schedule(step)
            optimizer.step({"shard": gradient.to(device)})
        results[device] = shard.cpu()
    torch.testing.assert_close(results[DEVICE], results["cpu"], rtol=1e-12, atol=1e-14)
    assert not torch.equal(results["cpu"], start)
