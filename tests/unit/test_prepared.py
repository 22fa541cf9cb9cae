"""What `run.prepare` makes of a script's objects, and which it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_loop import MODULE, make_loader, take
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pipelines.loop import Run
from pipelines.loop.loop import Loop
from pipelines.loop.prepared.optimizer_factory import ScriptOptimizerFactory
from pipelines.loop.script import script_of
from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.thread import Request

SAMPLES = TensorDataset(torch.ones(4, 2))
MODEL = nn.Linear(2, 1)

OPTIMIZER = SGD(MODEL.parameters(), lr=0.1, momentum=0.9)


def scheduled_optimizer() -> SGD:
    optimizer = SGD(MODEL.parameters(), lr=0.1)
    LambdaLR(optimizer, float)
    return optimizer


def hooked_optimizer(kind: str) -> SGD:
    optimizer = SGD(MODEL.parameters(), lr=0.1)
    getattr(optimizer, f"register_step_{kind}_hook")(lambda *arguments: None)
    return optimizer


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ((3,), "cannot prepare int; pass a model"),
        ((DataLoader(each for each in [1.0]),), "or __iter__, which begins again each time"),
        ((DataLoader(TensorDataset(torch.ones(0))),), "dataset is empty"),
        ((nn.DataParallel(MODEL),), "wrapped by DataParallel: pass the model itself"),
        ((MODEL,), "the optimizer and the loader"),
        ((MODEL, SGD(nn.Linear(1, 1).parameters()), make_loader()), "the model does not have"),
        ((MODEL, SGD([MODEL.bias]), make_loader()), "lacks parameter weight"),
        (
            (MODEL, OPTIMIZER, make_loader(), LambdaLR(SGD([MODEL.bias]), float)),
            "another optimizer",
        ),
        ((MODEL, scheduled_optimizer(), make_loader()), "has a learning-rate scheduler; pass it"),
        ((MODEL, hooked_optimizer("pre"), make_loader()), "has a hook on its step, which the run"),
        ((MODEL, hooked_optimizer("post"), make_loader()), "has a hook on its step, which the run"),
    ],
)
def test_objects_that_cannot_be_elastic_are_refused_in_one_line(
    objects: tuple[Any], message: str
) -> None:
    def script(run: Run) -> None:
        run.prepare(*objects)
        run.steps(3)

    with pytest.raises(LoopMisused, match=message) as raised:
        script_of(script)
    assert "\n" not in str(raised.value)


def twins() -> nn.Module:
    """Two parameters in the same memory, which is no tie: each has a gradient of its own."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = nn.Parameter(model[0].weight)
    return model


def test_second_parameter_in_the_same_memory_is_refused_in_one_line() -> None:
    def made_before(run: Run) -> None:
        run.prepare(twins())

    def made_after(run: Run) -> None:
        model = run.prepare(nn.Linear(2, 1))
        own = nn.Parameter(model.weight.detach().clone())
        assert own.data_ptr() != model.weight.data_ptr()
        nn.Parameter(model.weight)

    messages = {
        made_before: r"0\.weight and 1\.weight are two parameters in the same memory",
        made_after: r"nn\.Parameter\(\.\.\.\) of a parameter of a prepared model: a second one",
    }
    for script, message in messages.items():
        with pytest.raises(LoopMisused, match=message) as raised:
            script_of(script)
        assert "\n" not in str(raised.value)


def test_prepared_model_has_its_parameters_until_the_loop_starts() -> None:
    messages: list[str] = []

    def script(run: Run) -> None:
        model = run.prepare(nn.Linear(2, 1))
        assert len(list(model.parameters())) == 2 and model.in_features == 2
        optimizer = run.prepare(SGD(model.parameters(), lr=0.5))
        loader = run.prepare(make_loader())
        assert len(loader) == 5
        for step in run.steps(3):
            with step:
                for points in step.batches():
                    for call in (model.state_dict, model.parameters):
                        with pytest.raises(LoopMisused) as raised:
                            list(call())
                        messages.append(str(raised.value))
                    step.backward(model(points).mean())
                    optimizer.step()
                    optimizer.zero_grad()

    loop = Loop(script, 0)
    MODULE.weight.grad = None
    take(loop)
    take(loop, 2)
    assert MODULE.weight.grad is not None
    assert len(set(messages)) == 2 and all("sharded over the workers" in m for m in messages)


def test_prepared_model_is_its_part_within_a_step() -> None:
    """What the body's forward sets is what the script reads; other instances are plain."""
    seen = []

    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.aux, self.num_calls = nn.Linear(2, 1), torch.zeros(()), 0

        def forward(self, points: Tensor) -> Tensor:
            hidden = self.layer(points)
            self.aux, self.num_calls = hidden.square().mean(), self.num_calls + 1
            return hidden

    def script(run: Run) -> None:
        model = Auxiliary()
        optimizer = SGD(model.parameters(), lr=0.5)
        model, optimizer, _ = run.prepare(model, optimizer, make_loader())
        for step in run.steps(3):
            with step:
                for points in step.batches():
                    step.backward(model(points).mean() + model.aux)
                    seen.append((model.aux.requires_grad, model.num_calls))
            assert len(list(type(model)().parameters())) == 2
            model.train()
            model.zero_grad()

    loop = Loop(script, 0)
    part = Auxiliary()
    for number in (1, 2):
        take(loop, number, module=part)
        assert loop.request is None, "`train` and `zero_grad` need no weights"
    assert seen == [(True, 1), (True, 2), (True, 3), (True, 4)]
    assert part.layer.weight.grad is not None


def test_loader_has_the_attributes_of_the_scripts_own() -> None:
    """As in every script for DistributedDataParallel."""
    seen = []

    def script(run: Run) -> None:
        model = nn.Linear(2, 1)
        data = TensorDataset(torch.randn(10, 2))
        sampler = DistributedSampler(data, num_replicas=1, rank=0)
        loader = DataLoader(data, batch_size=2, sampler=sampler)
        optimizer = SGD(model.parameters(), lr=0.1)
        model, _, loader = run.prepare(model, optimizer, loader)
        for step in run.steps(3):
            loader.sampler.set_epoch(step.epoch)
            seen.append((loader.batch_size, len(loader.dataset), hasattr(loader, "nothing")))
            with step:
                for points in step.batches():
                    step.backward(model(points).mean())

    take(Loop(script, 0))
    assert set(seen) == {(2, 10, False)}


def test_part_of_the_model_between_two_steps_has_the_trained_values() -> None:
    """The first use of any part asks for them."""

    def script(run: Run) -> None:
        model = nn.Sequential()
        model.layer = nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), lr=0.5)
        model, optimizer, _ = run.prepare(model, optimizer, make_loader())
        for step in run.steps(3):
            with step:
                for points in step.batches():
                    step.backward(points.sum() * torch.ones((), requires_grad=True))
            assert not hasattr(model, "nothing")
            assert model.layer.weight is not None

    loop = Loop(script, 0)
    take(loop)
    assert loop.request is Request.WEIGHTS
    loop.answer(None)
    assert loop.await_arrival() and loop.request is None


def test_only_optimizers_that_the_script_steps_step_or_all() -> None:
    model = nn.Linear(2, 1)
    optimizers = [SGD([model.weight], lr=0.1), SGD([model.bias], lr=0.1)]
    names = {parameter: name for name, parameter in model.named_parameters()}
    factory = ScriptOptimizerFactory(optimizers, [], names, None)
    values = factory.values
    assert factory.is_stepped("weight") and factory.is_stepped("bias")
    values.note_step(optimizers[1])
    assert not factory.is_stepped("weight") and factory.is_stepped("bias")
    values.keep()
    values.take(optimizers[0])  # by a scheduler
    assert factory.is_stepped("weight") and factory.is_stepped("bias")


def test_second_model_without_an_optimizer_is_refused() -> None:
    def script(run: Run) -> None:
        loader = DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2, shuffle=True)
        model = nn.Linear(2, 1)
        run.prepare(model, nn.Linear(2, 2), SGD(model.parameters(), lr=0.1), loader)
        next(run.steps(1))

    with pytest.raises(LoopMisused, match=r"the optimizer lacks parameter 1\.weight: .* run\.keep"):
        script_of(script)


def test_parameter_of_two_optimizers_is_refused() -> None:
    names = {parameter: name for name, parameter in MODEL.named_parameters()}
    with pytest.raises(LoopMisused, match="two optimizers, or groups, have parameter bias"):
        ScriptOptimizerFactory([OPTIMIZER, SGD([MODEL.bias], lr=0.1)], [], names, None)


def test_optimizer_that_has_stepped_is_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        model.weight.grad *= torch.tensor([1.0, 2.0])
    optimizer.step()
    names = {parameter: name for name, parameter in model.named_parameters()}
    with pytest.raises(LoopMisused, match="Adam has stepped before the loop"):
        ScriptOptimizerFactory([optimizer], [], names, None)
