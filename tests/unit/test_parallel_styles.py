"""The words of a recipe's plan: what torch's parallel styles mean here, and what is refused."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from pipelines.errors import UserError
from pipelines.loop.prepared.tensor_plans import TensorPlans
from pipelines.loop.state.errors import LoopMisused
from pipelines.training.custom.custom_shape import shape_of


class OtherStyle(ColwiseParallel):
    """A style of a user, which may do more."""


def make_module() -> nn.ModuleDict:
    layers = nn.ModuleList(
        nn.ModuleDict({"norm": nn.LayerNorm(4), "up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
        for _ in range(2)
    )
    return nn.ModuleDict({"embed": nn.Embedding(7, 4), "layers": layers, "head": nn.Linear(4, 7)})


@pytest.mark.parametrize(
    ("name", "planned", "style"),
    [
        ("layers.*.up", ColwiseParallel(), "colwise"),
        ("layers.*.up", ColwiseParallel(input_layouts=Shard(1)), "colwise"),
        ("layers.?.up", ColwiseParallel(use_local_output=False), "colwise_gathered"),
        ("layers.*.up", ColwiseParallel(output_layouts=Replicate()), "colwise_gathered"),
        ("layers.1.u*", ColwiseParallel(output_layouts=Shard(0)), "colwise_gathered"),
        ("layers.*.down", RowwiseParallel(output_layouts=Shard(1)), "rowwise"),
        ("layers.1.down", RowwiseParallel(input_layouts=Replicate()), "rowwise"),
        ("embed", RowwiseParallel(input_layouts=Replicate()), "vocabulary"),
        ("embed", "rowwise", "vocabulary"),
    ],
)
def test_styles_of_torch_mean_a_style_of_this_project(name, planned, style) -> None:
    shape = shape_of(make_module(), {name: planned})
    assert set(shape.styles.values()) == {style}
    assert "tp" not in dict(shape.limits.refused)
    assert len(shape.styles) == (2 if name.startswith(("layers.*", "layers.?")) else 1)


class Scaled(nn.Embedding):
    """Computes more than a lookup, which a sharded lookup would leave out."""

    def forward(self, tokens):
        return 2 * super().forward(tokens)


def test_layers_whose_own_computation_would_be_skipped_are_refused() -> None:
    module = make_module()
    module["embed"] = Scaled(7, 4)
    with pytest.raises(UserError, match="embed is Scaled, which computes more than torch's Emb"):
        shape_of(module, {"embed": "rowwise"})
    module["embed"] = nn.Embedding(7, 4, max_norm=1.0)
    with pytest.raises(UserError, match="embed is Embedding, which computes more"):
        shape_of(module, {"embed": RowwiseParallel()})
    nn.utils.parametrizations.weight_norm(module["head"])
    with pytest.raises(UserError, match="head is parametrized"):
        shape_of(module, {"head": "colwise"})


def test_tied_weights_are_planned_alike() -> None:
    """One of them alone would compute with parts of the weight as if they were whole."""
    module = make_module()
    module["head"].weight = module["embed"].weight
    with pytest.raises(UserError, match="head and embed share their weight, but the plan"):
        shape_of(module, {"head": "colwise"})
    with pytest.raises(UserError, match="head and embed share their weight, but the plan"):
        shape_of(module, {"embed": "rowwise"})
    styles = shape_of(module, {"embed": "rowwise", "head": "colwise"}).styles
    assert set(styles.values()) == {"vocabulary", "colwise"}


def test_layers_that_stay_whole_have_no_style() -> None:
    plan = {
        "layers.*.norm": SequenceParallel(),
        "layers.*": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "layers": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
    }
    shape = shape_of(make_module(), plan)
    assert not shape.styles
    assert "the recipe has no plan" in dict(shape.limits.refused)["tp"]


def test_rows_of_an_embedding_and_a_gathered_output_need_not_divide() -> None:
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    assert shape_of(make_module(), plan).limits.tp_divides is None
    whole = plan | {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    assert shape_of(make_module(), whole).limits.tp_divides == 8


@pytest.mark.parametrize(
    ("planned", "message"),
    [
        (ColwiseParallel(input_layouts=Shard(-1)), r"layers\.\*\.up has ColwiseParallel\(input_l"),
        (ColwiseParallel(output_layouts=Partial()), r"output_layouts=P.*not possible here"),
        (RowwiseParallel(output_layouts=Shard(-1)), r"RowwiseParallel\(output_layouts=S"),
        (
            PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(-1)),
            r"PrepareModuleInput\(desired_input_layouts=",
        ),
        (
            PrepareModuleInput(
                input_kwarg_layouts={"x": Shard(2)}, desired_input_kwarg_layouts={"x": Replicate()}
            ),
            r"PrepareModuleInput\(input_kwarg_layouts=",
        ),
        (
            PrepareModuleInputOutput(
                input_layouts=Shard(1),
                desired_input_layouts=Replicate(),
                output_layouts=Partial(),
                desired_output_layouts=Shard(1),
            ),
            r"PrepareModuleInputOutput\(output_layouts=",
        ),
        (OtherStyle(), r"layers\.\*\.up has OtherStyle, which is not known here: use Colwise"),
        ("columns", r"layers\.\*\.up is Linear and cannot be columns"),
    ],
)
def test_what_is_not_possible_is_one_line_with_the_layer(planned, message) -> None:
    with pytest.raises(UserError, match=message) as refused:
        shape_of(make_module(), {"layers.*.up": planned})
    assert "\n" not in str(refused.value)


def test_an_embedding_cannot_be_sharded_by_columns() -> None:
    with pytest.raises(UserError, match="embed is Embedding and cannot be ColwiseParallel"):
        shape_of(make_module(), {"embed": ColwiseParallel()})


def test_plans_of_several_models_of_a_loop_are_one_plan() -> None:
    plans = TensorPlans()
    plans.add({"up": "colwise"}, 4, ["moe.experts"], model=1, num_models=1)
    plans.add({"layers.*": "rowwise"}, 6, [], model=0, num_models=1)
    assert plans.joined(2) == ({"1.up": "colwise", "0.layers.*": "rowwise"}, 2)
    assert plans.experts(2) == ["1.moe.experts"]
    assert TensorPlans().joined(1) == ({}, None)
    with pytest.raises(LoopMisused, match="a plan with 2 models"):
        plans.add({"up": "colwise"}, None, [], model=0, num_models=2)
