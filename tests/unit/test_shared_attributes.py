"""A worker's part of a script's model shares with it what is neither a tensor nor a module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_loop import make_loader, take
from torch import Tensor, nn
from torch.optim import SGD

from pipelines.loop import Run
from pipelines.loop.loop import Loop
from pipelines.loop.modules.model_copies import copy_models
from pipelines.loop.modules.model_views import plain
from pipelines.loop.modules.module_numbers import ModuleNumbers
from pipelines.loop.modules.shared_attributes import SharedAttributes
from pipelines.loop.prepared.called_module import CalledModels
from pipelines.loop.prepared.model import prepare_model

POINTS = torch.ones(1, 2)


class Layer(nn.Linear):
    """A linear layer with attributes that a script may change."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.temperature, self.mode, self.num_calls = 1.0, "soft", 0

    def forward(self, points: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(points) * self.temperature


class Model(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer, self.config = Layer(), config
        self.act = self.scaled
        self.observer = SimpleNamespace(layer=self.layer, outputs=[], config=config)
        self.noted: list[Tensor] = []
        self.table = torch.arange(3.0)

    def scaled(self, points: Tensor) -> Tensor:
        return points * self.config.ratio

    def forward(self, points: Tensor) -> Tensor:
        return self.act(self.layer(points))


class Tap:
    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def hook(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.outputs.append(output)


def prepared(config: Any = None) -> Any:
    return prepare_model(Model(config or SimpleNamespace(ratio=1.0)), CalledModels())


def part_of(model: nn.Module) -> tuple[Any, SharedAttributes]:
    part = copy_models([model])
    shared = SharedAttributes.of(model, part)
    shared.begin()
    return part, shared


def test_copy_has_its_own_tensors_and_modules_and_shares_the_rest() -> None:
    model = prepared()
    part, _ = part_of(model)
    assert type(part) is Model and part.layer is not plain(model).layer
    assert part.layer.weight is not plain(model).layer.weight
    assert part.config is model.config and part.noted is model.noted and part.table is model.table
    assert part.act.__self__ is part
    observer = part.observer
    assert observer.layer is part.layer and observer.outputs is model.observer.outputs
    assert observer is not model.observer and observer.config is model.config
    with torch.device("meta"):
        shapes = copy_models([model])
    assert shapes.layer.weight.is_meta and shapes.config is model.config
    assert not shapes.table.is_meta


def test_owner_of_a_hook_is_the_script_s() -> None:
    model, tap = prepared(), Tap()
    model.layer.register_forward_hook(tap.hook)
    model.layer.register_forward_hook(lambda layer, _, output: model.noted.append(layer))
    part, _ = part_of(model)
    part(POINTS)
    assert len(tap.outputs) == 1 and model.noted == [part.layer]


def test_hooks_follow_the_script_and_those_of_the_run_stay_in_their_places() -> None:
    model, calls = prepared(), []
    handle = model.layer.register_forward_hook(lambda *_: calls.append("first"))
    part = copy_models([model])
    part.layer.register_forward_hook(lambda *_: calls.append("before"), prepend=True)
    part.layer.register_forward_hook(lambda *_: calls.append("behind"))
    shared = SharedAttributes.of(model, part)
    shared.begin()
    part(POINTS)
    model.layer.register_forward_hook(lambda *_, **__: calls.append("second"), with_kwargs=True)
    shared.begin()
    part(POINTS)
    handle.remove()
    shared.begin()
    part(POINTS)
    assert calls == [
        *("before", "first", "behind"),
        *("before", "first", "second", "behind"),
        *("before", "second", "behind"),
    ]


def test_attributes_and_modes_go_both_ways() -> None:
    model = prepared()
    part, shared = part_of(model)
    model.layer.temperature, model.layer.mode, model.layer.extra = 0.5, "hard", None
    model.layer.eval()
    shared.push()
    assert (part.layer.temperature, part.layer.mode, part.layer.extra) == (0.5, "hard", None)
    assert not part.layer.training and part.training
    assert shared.changed_texts == ["layer.mode"]
    part(POINTS)
    part.layer.mode = "soft"
    part.layer.train()
    del model.layer.extra
    shared.pull()
    assert (model.layer.num_calls, model.layer.mode, model.layer.training) == (1, "soft", True)
    shared.push()
    assert not hasattr(part.layer, "extra") and part.layer.num_calls == 1


def test_objects_that_hold_parts_of_the_model_hold_those_of_the_copy() -> None:
    model = prepared()
    part, shared = part_of(model)
    config = SimpleNamespace(ratio=3.0)
    model.config, model.observer = config, SimpleNamespace(layer=model.layer, config=config)
    shared.push()
    assert part.config is config and part.observer.config is config
    assert part.observer.layer is part.layer


def test_numbers_of_objects_that_hold_parts_of_the_model_go_both_ways() -> None:
    model = prepared()
    part, shared = part_of(model)
    model.observer.limit = 4.0
    shared.push()
    assert part.observer.limit == 4.0
    part.observer.limit = 5.0
    shared.pull()
    assert model.observer.limit == 5.0
    model.observer = SimpleNamespace(layer=model.layer, limit=6.0)
    shared.push()
    model.observer.limit = 7.0
    shared.push()
    assert part.observer.limit == 7.0 and part.observer.layer is part.layer


def test_what_the_run_replaces_in_the_copy_stays() -> None:
    model = prepared()
    plain(model).layer.forward = plain(model).layer.forward
    part = copy_models([model])
    assert part.layer.forward.__self__ is part.layer
    part.layer.forward = lambda points: points
    shared = SharedAttributes.of(prepared(), part)
    shared.begin()
    assert torch.equal(part.layer(POINTS), POINTS)


def test_part_follows_the_model_of_a_restarted_script() -> None:
    """Its hooks write to what the script has now, and its attributes are those of the script."""
    first, second = prepared(), prepared(SimpleNamespace(ratio=2.0))
    taps = Tap(), Tap()
    for model, tap in zip((first, second), taps, strict=True):
        model.layer.register_forward_hook(tap.hook)
    second.layer.temperature = 3.0
    part = copy_models([first])
    part.layer.register_forward_hook(lambda layer, _, output: 2 * output)
    shared = SharedAttributes.of(second, part)
    shared.begin()
    output = part(POINTS)
    assert [len(tap.outputs) for tap in taps] == [0, 1]
    expected = nn.functional.linear(POINTS, part.layer.weight, part.layer.bias)
    torch.testing.assert_close(output, expected * 3.0 * 2 * 2.0)
    assert part.config is second.config and part.act.__self__ is part


@pytest.mark.parametrize("value", [True, 2, 0.5, None, float("inf")])
def test_numbers_and_modes_are_restored(value: Any) -> None:
    model = prepared()
    model.layer.temperature = value
    model.layer.eval()
    numbers = ModuleNumbers([model])
    model.layer.temperature, model.layer.num_calls = 0.25, 7
    model.layer.train()
    assert numbers.live() != numbers.kept
    numbers.restore(numbers.kept)
    assert model.layer.temperature == value and model.layer.num_calls == 0
    assert not model.layer.training and model.training


def test_modes_within_a_step_are_those_of_model_and_part() -> None:
    seen: list[tuple[bool, ...]] = []

    def script(run: Run) -> None:
        raw = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval()
        optimizer = SGD(raw.parameters(), lr=0.1)
        model, optimizer, _ = run.prepare(raw, optimizer, make_loader())
        for step in run.steps(3):
            with step:
                if step.number == 1:
                    model.train()
                    model[1].eval()
                    model.train()
                for points in step.batches():
                    step.backward(model(points).mean())
                    seen.append((model.training, model[0].training, model[1].training))
                model[1].eval()
            seen.append((raw.training, raw._modules["0"].training, raw._modules["1"].training))

    loop = Loop(script, 0)
    part = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval()
    for number in (1, 2):
        take(loop, number, module=part)
        while loop.request is not None:
            loop.answer(None)
            loop.await_arrival()
    before, after = (True, True, True), (True, True, False)
    assert seen == [before, before, after, after, after, after]


class Bound(nn.Module):
    """A forward pass as a function that refers to parts, to the module and to other objects."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Tanh()})
        parts, noted = self.parts, []
        self.noted: list[int] = noted
        self.scale = nn.Parameter(torch.ones(()))

        def through(points: Tensor, *, factor: float = 2.0) -> Tensor:
            noted.append(len(points))
            hidden: Tensor = parts.second(parts.first(points))
            return hidden * self.scale * factor

        self.through = through

    def forward(self, points: Tensor) -> Tensor:
        return self.through(points)


def test_function_that_refers_to_parts_refers_to_their_copies() -> None:
    model = prepare_model(Bound(), CalledModels())
    own = plain(model)
    part = copy_models([model])
    copied = part if isinstance(part, Bound) else next(iter(part.children()))
    assert copied.through is not own.through and copied.noted is own.noted
    before = own(POINTS)
    with torch.no_grad():
        copied.parts["first"].weight.zero_()
        copied.parts["first"].bias.fill_(0.5)
        copied.scale.fill_(3.0)
    expected = torch.tensor(0.5).tanh() * 3 * 2
    torch.testing.assert_close(copied(POINTS), expected.expand(POINTS.shape))
    torch.testing.assert_close(own(POINTS), before)
    assert own.noted == [len(POINTS)] * 3
