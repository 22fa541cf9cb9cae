"""Custom modules and data: the values that the workload derives, and its refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic.geometry.regions import Region
from pipelines.errors import UserError
from pipelines.run.plan import RunPlan, TrainRequest, make_plan, store_recipe
from pipelines.settings import TrainSettings
from pipelines.settings.recipe import Recipe
from pipelines.training.custom.custom_shape import shape_of
from pipelines.training.custom.custom_workload import CustomWorkload
from pipelines.training.custom.modules.custom_module import build_on_host, build_shapes, find_blocks
from pipelines.training.custom.modules.loss_sums import loss_sums_of
from pipelines.training.passes.running_buffers import RunningBuffers
from pipelines.training.replica.warm_up import group_of_one

CPU = torch.device("cpu")
SCALAR = torch.tensor(3.0)


class Reading(nn.Module):
    """A constructor that reads values, with tied weights and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate)) for rate in rates
        )
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.ones(4), persistent=False)


def make_recipe(**changes: object) -> Recipe:
    return Recipe(
        **{
            "model": lambda: nn.Linear(2, 1),
            "loss": lambda model, batch: model(batch).mean(),
            "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
            "data": lambda: [torch.full((2,), float(i)) for i in range(6)],
            "settings": TrainSettings(batch=4, microbatch=2),
            **changes,
        }
    )


def test_loss_is_a_mean_or_a_sum_with_a_count() -> None:
    assert loss_sums_of(SCALAR, 4) == (torch.tensor(12.0), torch.tensor(4))
    assert loss_sums_of(SCALAR[None], 4).loss.shape == ()
    assert loss_sums_of((SCALAR, 7), 4) == (SCALAR, torch.tensor(7))
    assert loss_sums_of((SCALAR, torch.tensor([7])), 4).num_tokens.shape == ()


def test_losses_of_the_samples_are_summed() -> None:
    assert loss_sums_of(torch.tensor([1.0, 2.0, 4.0]), 3) == (torch.tensor(7.0), torch.tensor(3))


@pytest.mark.parametrize("result", [torch.ones(3), None, (torch.ones(4), 4), {"loss": SCALAR}])
def test_loss_of_another_form_is_refused(result: object) -> None:
    with pytest.raises(UserError, match="return one loss for each sample, "):
        loss_sums_of(result, 4)


def test_padding_has_zero_tokens_and_zero_gradients() -> None:
    workload = CustomWorkload(make_recipe())
    module = nn.Linear(2, 1)
    batch = workload.feed(workload.empty(), CPU, None, -1)
    loss, num_tokens = workload.losses(module, batch, None)
    loss.backward()
    assert (loss.item(), num_tokens.item()) == (0.0, 0)
    assert not module.weight.grad.any() and not module.bias.grad.any()


def test_blocks_are_inferred_or_named() -> None:
    module = build_on_host(Reading, 0)
    layers = list(module.layers)
    assert find_blocks(module) == layers
    assert find_blocks(module, ["layers.1", "first"]) == [layers[1], module.first]
    assert find_blocks(module, [nn.Sequential]) == layers
    assert find_blocks(module, []) == []
    with pytest.raises(UserError, match=r"no layer\.1; similar: layers\.1"):
        find_blocks(module, ["layer.1"])
    with pytest.raises(UserError, match="no part of class Conv2d"):
        find_blocks(module, [nn.Conv2d])


def test_build_shapes_keeps_tensors_outside_of_the_state() -> None:
    module = build_shapes(Reading, 0)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert torch.equal(module.scale, torch.ones(4))
    assert module.last.weight is module.first.weight
    assert build_shapes(lambda: nn.Linear(2, 2), 0).weight.is_meta


class Marked(nn.Module):
    """A module that notes on its parameters which do not decay; it may read values when built."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 1)
        self.first.bias.no_decay = self.last.weight.no_decay = True
        self.scale = self.first.weight.sum().item() if reads else 1.0


@pytest.mark.parametrize("reads", [False, True])
def test_optimizer_sees_what_the_model_has_noted_on_its_parameters(reads: bool) -> None:
    def optimizer(named: Any) -> torch.optim.Optimizer:
        groups = [
            [shard for _, shard in named if getattr(shard, "no_decay", False) is wanted]
            for wanted in (True, False)
        ]
        return torch.optim.SGD([{"params": group} for group in groups], lr=0.1)

    workload = CustomWorkload(make_recipe(model=lambda: Marked(reads), optimizer=optimizer))
    names = ["first.weight", "first.bias", "last.weight", "last.bias"]
    shards = [(name, torch.full((1,), float(n))) for n, name in enumerate(names)]
    groups = workload.optimizer_factory.build(shards).param_groups
    assert [[int(shard) for shard in group["params"]] for group in groups] == [[1, 2], [0, 3]]


def test_values_of_step_0_are_the_constructors_and_keep_the_global_generator() -> None:
    torch.manual_seed(5)
    expected = nn.Linear(2, 1)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    workload = CustomWorkload(make_recipe(settings=TrainSettings(seed=5)))
    values = workload.draw("weight", (1, 2), Region((0, 1), (1, 1)), seed=5)
    assert torch.equal(values, expected.weight[:, 1:])
    assert torch.equal(torch.get_rng_state(), before)


def test_tensor_parallel_plan_determines_the_limit_of_tp() -> None:
    module = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(6, 4) for _ in range(2))})
    shape = shape_of(module, {"layers.*": "colwise"})
    assert shape.limits.tp_divides == 4
    assert shape.style_of("layers.1") == "colwise"
    assert shape_of(module, {"layers.*": "rowwise"}).limits.tp_divides == 6
    assert shape_of(module, {"layers.*": "rowwise"}, tp_divides=3).limits.tp_divides == 3
    assert "the recipe has no plan" in dict(shape_of(module, {}).limits.refused)["tp"]
    with pytest.raises(UserError, match="no layer; similar: layers"):
        shape_of(module, {"layer": "colwise"})
    with pytest.raises(UserError, match="is ModuleList and cannot be"):
        shape_of(module, {"layers": "colwise"})


def test_buffers_become_the_mean_over_the_microbatches() -> None:
    module = nn.BatchNorm1d(1, momentum=0.5, affine=False)
    module.register_buffer("constant", torch.ones(1))
    state = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for name, buffer in state.items():
        setattr(module, name, buffer)
    with group_of_one(CPU) as groups:
        moving = RunningBuffers([module], groups.world)
        moving.keep(state)
        for _ in range(2):
            before = {name: buffer.clone() for name, buffer in state.items()}
            moving.begin()
            for value, num_tokens in ((0.0, 2), (4.0, 2), (1e9, 0)):
                moving.begin_pass()
                module(torch.tensor([[value], [value + 2]]))
                moving.end_pass(torch.tensor(num_tokens), is_last=num_tokens == 0)
            moving.reduce()
            assert all(torch.equal(state[name], before[name]) for name in state), (
                "buffers change only at apply"
            )
        moving.apply()
    assert moving.moving == ["running_mean", "running_var", "num_batches_tracked"]
    assert state["running_mean"].item() == (0.5 * 1 + 0.5 * 5) / 2
    assert state["num_batches_tracked"].item() == 1
    assert all(getattr(module, name) is buffer for name, buffer in state.items())


def test_pass_that_replaces_buffers_keeps_the_old_ones_for_backward() -> None:
    """Changing one buffer does not invalidate another one for autograd."""

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(1))
            self.register_buffer("count", torch.zeros(1))
            self.weight = nn.Parameter(torch.full((1,), 3.0))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            output = self.weight * value / self.scale
            self.count += 1
            self.scale = self.scale + value
            return output

    module = Running()
    state = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with group_of_one(CPU) as groups:
        moving = RunningBuffers([module], groups.world)
        moving.keep(state)
        for number in range(2):
            moving.begin()
            for value in (2.0, 4.0):
                moving.begin_pass()
                output = module(torch.tensor([value]))
                moving.end_pass(torch.tensor(1), is_last=value == 4.0)
                module.weight.grad = None
                output.sum().backward()
                assert module.weight.grad == value / (1 + 3 * number)
            moving.reduce()
            moving.apply()
    assert (state["scale"].item(), state["count"].item()) == (7.0, 2.0)


def test_padding_of_an_evaluation_has_the_shape_of_held_out_data() -> None:
    workload = CustomWorkload(make_recipe(held_out=lambda: [torch.full((3,), 7.0)]))
    workload.read([0, 1])
    padding = workload.empty(held_out=True)
    assert (padding.value.shape, padding.num_samples) == ((2, 3), 0)
    assert workload.empty().value.shape == (2, 2)


class Heads(nn.Module):
    """A module that names its number of heads, or leaves it open."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.up, self.down, self.num_heads = nn.Linear(2, 8), nn.Linear(8, 1), num_heads

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(hidden).view(len(hidden), self.num_heads, 2).flatten(1))


def test_a_module_that_names_its_whole_width_is_refused_for_tp_only() -> None:
    plan = {"up": "colwise", "down": "rowwise"}
    limits = CustomWorkload(make_recipe(model=lambda: Heads(4), plan=plan)).limits()
    assert "shape '[2, 4, 2]' is invalid" in dict(limits.refused)["tp"]
    open_number = CustomWorkload(make_recipe(model=lambda: Heads(-1), plan=plan)).limits()
    assert "tp" not in dict(open_number.refused)


def make_run_plan(folder: Path, **changes: object) -> RunPlan:
    request = TrainRequest(
        str(folder / "mine.py:mine"), storage=str(folder / "runs"), run_name="one"
    )
    return make_plan(replace(request, **changes), 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a recipe file."""
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "import torch\n"
        "from pipelines.settings.recipe import Recipe, TrainSettings\n"
        "@dataclass\n"
        "class Data:\n"
        "    number: 'int'\n"
        "    def __len__(self): return self.number\n"
        "    def __getitem__(self, index): return torch.full((2,), float(index))\n"
        "def loss(model, batch): return model(batch).mean()\n"
        "def mine(size=1):\n"
        "    return Recipe(lambda: torch.nn.Linear(2, size), loss, torch.optim.Adam,\n"
        "                  lambda: Data(6), TrainSettings(batch=4, microbatch=2))\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"changes": ("eval_every=5",)}, "no held_out data"),
        ({"changes": ("optimizer.lr=0.1",)}, "defines its own optimizer"),
        ({"data": "texts"}, "defines its own data"),
        ({"layout": "tp=2", "workers": "2"}, "has no plan"),
        ({"layout": "pp=2", "workers": "2"}, "does not list the blocks"),
    ],
)
def test_unsupported_recipe_is_a_one_line_error(
    folder: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message) as refused:
        make_run_plan(folder, **changes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["loss", "top 5"])
def test_invalid_metric_names_are_refused(folder: Path, name: str) -> None:
    file = folder / "mine.py"
    body = f"return replace(whole(), metrics={{'{name}': loss}})"
    text = file.read_text().replace("def mine(size=1)", "def whole(size=1)")
    file.write_text(f"{text}from dataclasses import replace\ndef mine(): {body}\n")
    with pytest.raises(UserError, match=f"metrics: '{name}'"):
        make_run_plan(folder)


def test_parameter_without_dims_is_planned(folder: Path) -> None:
    file = folder / "mine.py"
    scaled = (
        "class Net(torch.nn.Linear):\n    def __init__(self, *a):\n        super().__init__(*a)\n"
    )
    scaled += "        self.scale = torch.nn.Parameter(torch.tensor(1.0))\n"
    text = file.read_text().replace("torch.nn.Linear(2, size)", "Net(2, size)")
    file.write_text(text.replace("def loss", f"{scaled}def loss"))
    plan = make_run_plan(folder)
    assert plan.run.opening.job.param_bytes == 4 * 4, "weight, bias and scale"


def test_number_of_evaluated_samples_is_reported(folder: Path) -> None:
    file = folder / "mine.py"
    text = file.read_text().replace(
        "lambda: Data(6),", "lambda: Data(6), held_out=lambda: Data(9),"
    )
    text = text.replace("TrainSettings(", "settings=TrainSettings(")
    file.write_text(text)
    changes = ("eval_every=5", "eval_samples=4")
    [note] = make_run_plan(folder, changes=changes).notes
    assert "the first 4 of 9 held-out samples" in note
    assert make_run_plan(folder, changes=("eval_every=5",)).notes == ()


@pytest.mark.parametrize(
    ("kind", "limit", "expected"),
    [("custom", None, 900), ("custom", 64, 64), ("mlp", None, 64), ("mlp", 8, 8)],
)
def test_all_held_out_samples_of_an_own_model_are_evaluated(kind, limit, expected) -> None:
    settings = TrainSettings.model_validate({"model": {"kind": kind}, "eval_samples": limit})
    assert settings.num_evaluated(900) == expected


def test_resumed_recipe_may_change_its_source_but_not_its_state(folder: Path) -> None:
    store_recipe(make_run_plan(folder))
    assert make_run_plan(folder).notes == ()
    file = folder / "mine.py"
    before = file.read_text()
    file.write_text(before + "# another line\n")
    [note] = make_run_plan(folder).notes
    assert "mine.py has changed since the run began" in note
    file.write_text(before.replace("size=1", "size=3"))
    with pytest.raises(UserError, match="other names, shapes or dtypes"):
        make_run_plan(folder)
