"""The optimizer over local shards equals that of torch, and its schedule is a pure function."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipelines.settings import OptimizerSettings
from pipelines.training.workload.optimizer import (
    AdamWBySettings,
    LocalOptimizer,
    learning_rate,
    state_templates,
)

SCHEDULE = OptimizerSettings(lr=0.1, min_lr_ratio=0.1, warmup_steps=10, decay_steps=110)


def make_state(settings: OptimizerSettings, shards: dict[str, torch.Tensor]):
    num_dims = {name: shard.ndim for name, shard in shards.items()}
    templates = state_templates(AdamWBySettings(settings), num_dims, torch.float64)
    return {
        name: {
            key: torch.zeros(shard.shape if value.ndim else (), dtype=value.dtype)
            for key, value in templates[name].items()
        }
        for name, shard in shards.items()
    }


def test_schedule_warms_up_decays_and_stays_constant() -> None:
    assert learning_rate(SCHEDULE, 1) == pytest.approx(0.01)
    assert learning_rate(SCHEDULE, 10) == pytest.approx(0.1)
    assert learning_rate(SCHEDULE, 60) == pytest.approx((0.1 + 0.01) / 2)
    assert learning_rate(SCHEDULE, 110) == pytest.approx(0.01)
    assert learning_rate(SCHEDULE, 10_000) == pytest.approx(0.01)


@given(step=st.integers(1, 400), warmup=st.integers(0, 50), decay=st.integers(0, 300))
def test_learning_rate_stays_within_its_bounds(step, warmup, decay) -> None:
    settings = SCHEDULE.model_copy(update={"warmup_steps": warmup, "decay_steps": decay})
    rate = learning_rate(settings, step)
    assert 0 < rate <= 0.1 * (1 + 1e-12)
    if step > warmup:
        assert rate >= 0.01 * (1 - 1e-12)
        assert learning_rate(settings, step + 1) <= rate


def test_learning_rate_without_decay_is_constant_after_warm_up() -> None:
    settings = OptimizerSettings(lr=0.2, warmup_steps=2)
    assert [learning_rate(settings, step) for step in (1, 2, 3, 99)] == [0.1, 0.2, 0.2, 0.2]


def test_state_templates_come_from_the_optimizer() -> None:
    templates = state_templates(AdamWBySettings(SCHEDULE), {"weight": 2}, torch.float64)
    template = templates["weight"]
    assert {key: tuple(value.shape) for key, value in template.items()} == {
        "step": (),
        "exp_avg": (2, 3),
        "exp_avg_sq": (2, 3),
    }
    assert template["exp_avg"].dtype == torch.float64


def test_local_optimizer_equals_torch_adamw_and_decays_only_matrices() -> None:
    torch.manual_seed(0)
    settings = OptimizerSettings(weight_decay=0.3)
    shards = {
        "matrix": torch.randn(4, 3, dtype=torch.float64),
        "vector": torch.randn(5, dtype=torch.float64),
        "nothing": torch.randn(0, 3, dtype=torch.float64),
    }
    expected = {name: shard.clone().requires_grad_() for name, shard in shards.items()}
    torch_optimizer = torch.optim.AdamW(
        [
            {"params": [expected["matrix"], expected["nothing"]], "weight_decay": 0.3},
            {"params": [expected["vector"]], "weight_decay": 0.0},
        ],
        betas=(settings.beta1, settings.beta2),
        foreach=False,
    )
    state = make_state(settings, shards)
    local_optimizer = LocalOptimizer(AdamWBySettings(settings), shards, state)
    assert local_optimizer.optimizer.defaults["fused"] and not torch_optimizer.defaults["fused"]
    for step in range(1, 9):
        gradients = {name: torch.randn_like(shard) for name, shard in shards.items()}
        for name, weight in expected.items():
            weight.grad = gradients[name].clone()
        for optimizer in (torch_optimizer, local_optimizer.optimizer):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / step
        torch_optimizer.step()
        local_optimizer.step(gradients)
    for name, weight in expected.items():
        torch.testing.assert_close(shards[name], weight.detach(), rtol=1e-12, atol=1e-14)
        for key, value in torch_optimizer.state[weight].items():
            torch.testing.assert_close(
                local_optimizer.state()[name][key], value, rtol=1e-12, atol=1e-14
            )
            assert local_optimizer.state()[name][key] is state[name][key]


def test_shard_without_a_gradient_does_not_change() -> None:
    ones = torch.ones(2, 2, dtype=torch.float64)
    shards = {"first": ones.clone(), "second": ones.clone()}
    local_optimizer = LocalOptimizer(
        AdamWBySettings(SCHEDULE), shards, make_state(SCHEDULE, shards)
    )
    local_optimizer.step({"first": ones})
    assert torch.equal(shards["second"], ones)
    assert not torch.equal(shards["first"], ones)
    assert local_optimizer.state()["first"]["step"].item() == 1
    assert local_optimizer.state()["second"]["step"].item() == 0
    assert all(shard.grad is None for shard in shards.values())
