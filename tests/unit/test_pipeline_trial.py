"""The trial of custom pipelines finds differences and refuses unsuitable recipes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic.geometry.model_limits import Limits
from pipelines.errors import UserError
from pipelines.settings import TrainSettings
from pipelines.settings.recipe import Recipe
from pipelines.training.custom.custom_shape import shape_of
from pipelines.training.custom.custom_workload import CustomWorkload
from pipelines.training.custom.modules.custom_pipeline import parts_of
from pipelines.training.custom.pipeline_trial import why_no_pipeline

PARTS = ["first", "layers.*", "last"]
BY_SHAPES = 0
"""The limit on parameters for a trial with real values: no model is below it."""


class Net(nn.Module):
    """A chain of blocks, with an optional operation between them."""

    def __init__(self, between=lambda hidden: hidden, inner=nn.Tanh) -> None:
        super().__init__()
        self.between = between
        self.first = nn.Linear(2, 3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), inner()) for _ in range(2))
        self.last = nn.Linear(3, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        for layer in self.layers:
            hidden = self.between(layer(hidden))
        return self.last(hidden)


class Pair(nn.Module):
    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, hidden


def loss(model, batch):
    return model(batch).square().mean()


def compute_under_autocast(model, batch):
    with torch.autocast("cpu"):
        return loss(model, batch)


def make_workload(model=Net, **changes: object) -> CustomWorkload:
    defaults = {
        "loss": loss,
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
        "data": lambda: [torch.randn(2) for _ in range(6)],
        "held_out": lambda: [torch.randn(2) for _ in range(3)],
        "settings": TrainSettings(batch=4, microbatch=2, eval_every=2),
        "pipeline": PARTS,
    }
    return CustomWorkload(Recipe(**{"model": model, **defaults, **changes}))


@pytest.mark.parametrize("max_parameters", [BY_SHAPES, 100])
def test_chain_of_blocks_is_a_pipeline(max_parameters: int) -> None:
    workload = make_workload(metrics={"mean": lambda model, batch: (model(batch).sum(), 3)})
    assert why_no_pipeline(workload, max_parameters) is None
    assert [tuple(tensor.shape) for tensor in workload.flow] == [
        (2, 2),
        (2, 3),
        (2, 3),
        (2, 3),
        (2, 1),
    ]
    assert [tensor.requires_grad for tensor in workload.flow] == [False, True, True, True, True]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Net(torch.relu), "do not give the output"),
        (lambda: Net(lambda hidden: hidden.detach()), "do not give the gradients"),
        (lambda: Net(lambda pair: pair[0], Pair), r"layers\.0 .* returns tuple"),
    ],
)
def test_modules_that_are_not_a_chain_are_detected(model, message: str) -> None:
    limits = make_workload(model).limits()
    [reason] = [text for axis, text in limits.refused if axis == "pp"]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(reason)
    assert "\n" not in reason


class NoisyInEvaluation(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.training else hidden + torch.rand_like(hidden)


@pytest.mark.parametrize("max_parameters", [BY_SHAPES, 100])
@pytest.mark.parametrize("inner", [lambda: nn.BatchNorm1d(3), lambda: nn.Dropout(0.5)])
def test_changing_buffers_and_random_draws_are_accepted(inner, max_parameters: int) -> None:
    assert why_no_pipeline(make_workload(lambda: Net(inner=inner)), max_parameters) is None


def test_random_draws_of_an_evaluation_are_refused() -> None:
    workload = make_workload(lambda: Net(inner=NoisyInEvaluation))
    assert "draw only if module.training" in (why_no_pipeline(workload) or "")


def noisy_loss(model, batch):
    return loss(model, batch + torch.rand_like(batch)) * torch.rand(())


def test_a_loss_may_draw_before_and_behind_its_module() -> None:
    settings = TrainSettings(batch=4, microbatch=2)
    assert why_no_pipeline(make_workload(loss=noisy_loss, settings=settings)) is None


@pytest.mark.parametrize("model", [Net, lambda: Net(inner=lambda: nn.Dropout(0.5))])
def test_blocks_are_seeded_only_if_the_recipe_draws(model) -> None:
    draws = model is not Net
    assert (make_workload(model).block_seeds is not None) == draws


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": lambda model, batch: loss(model, batch) + loss(model, batch)}, "2 times each"),
        ({"loss": lambda model, batch: model(hidden=batch).mean()}, "with (hidden=)"),
        ({"loss": lambda model, batch: batch.mean()}, "does not call its module"),
        ({"loss": lambda model, batch: loss(model, batch) + model.last.bias.sum()}, "uses last of"),
        ({"loss": compute_under_autocast}, "under autocast"),
        ({"metrics": {"twice": lambda model, batch: loss(model, 2 * batch)}}, "metric twice calls"),
        ({"held_out": lambda: [torch.randn(4, 2) for _ in range(3)]}, "pad samples to one size"),
        ({"pipeline": ["first", "layers.*"]}, "leaves out last.weight"),
        ({"pipeline": ["first", "layers.*.0", "last"], "blocks": ["layers.0"]}, "set `blocks`"),
    ],
)
def test_recipes_that_are_not_a_pipeline_are_refused_only_for_pp(changes, message: str) -> None:
    limits = make_workload(**changes).limits()
    refused = dict(limits.refused)
    assert message in refused["pp"] and "\n" not in refused["pp"]


def test_evaluation_is_padded_only_if_samples_are_independent() -> None:
    class Centred(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden - hidden.mean(0))

    def make_centred_net() -> Net:
        net = Net()
        net.last = Centred(3, 1)
        return net

    wide = TrainSettings(batch=4, microbatch=4, eval_every=2)
    assert "--set eval_samples=4" in (
        why_no_pipeline(make_workload(make_centred_net, settings=wide)) or ""
    )
    assert why_no_pipeline(make_workload(settings=wide)) is None
    assert (
        why_no_pipeline(
            make_workload(make_centred_net, settings=wide.model_copy(update={"eval_every": 0}))
        )
        is None
    )


def test_blocks_are_named_in_order() -> None:
    module = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(11))})
    names = [f"layers.{number}" for number in range(11)]
    assert parts_of(module, ["layers.*"]) == tuple(names)
    assert [layer.modules for layer in shape_of(module, {}, pipeline=["layers.*"]).layers] == [
        (name,) for name in names
    ]
    with pytest.raises(UserError, match=r"no layer\.\*; similar: layers\.\*"):
        parts_of(module, ["layer.*"])
    with pytest.raises(UserError, match=r"layers\.3 is named twice"):
        parts_of(module, ["layers.*", "layers.3"])
    module["layers"][4].weight = module["layers"][9].weight
    limits: Limits = shape_of(module, {}, pipeline=["layers.*"]).limits
    refused = dict(limits.refused)["pp"]
    assert "layers.4.weight and layers.9.weight of the recipe's pipeline are one weight" in refused


def test_block_without_trained_parameters_joins_a_neighbour() -> None:
    parts = (nn.Embedding(9, 2).requires_grad_(False), nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    module = nn.Sequential(*parts, nn.Flatten())
    layers = shape_of(module, {}, pipeline=["*"]).layers
    assert [layer.modules for layer in layers] == [("0", "1"), ("2", "3", "4")]
    assert [layer.cost for layer in layers] == [2 + 9, 1 + 4 + 1]


def test_blocks_with_a_tp_sharded_tensor_between_them_stay_together() -> None:
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    shape = shape_of(module, {"*": "colwise"}, pipeline=["*"])
    assert len(shape.layers) == 1
    named = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("first", "up", "down", "last")})
    plan = {"up": "colwise", "down": "rowwise"}
    shape = shape_of(named, plan, pipeline=["first", "up", "down", "last"])
    assert [layer.modules for layer in shape.layers] == [("first",), ("up", "down"), ("last",)]
