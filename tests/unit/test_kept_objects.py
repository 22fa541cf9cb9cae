"""Objects that a script keeps are read, restored and refused as named tensors."""

from __future__ import annotations

from collections import deque
from inspect import currentframe
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipelines.loop.state.carried_state import CarriedState
from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.state.kept_objects import KeptObjects
from pipelines.loop.state.named_values import NamedValues
from pipelines.loop.state.script_state import ScriptState
from pipelines.loop.state.script_values import ScriptValues


class Average:
    """An object of a library: numbers, tensors and others, in lists."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"decay": 0.5, "shadow": [torch.ones(2)], "collected": None}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Metric(nn.Module):
    """As one of torchmetrics: its values are not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()), persistent=False)


def test_object_without_values_is_refused() -> None:
    for item, name in ((Metric(), "Metric"), ({}, "dict")):
        message = f"the state of {name} has no tensor or number, so nothing would be kept"
        with pytest.raises(LoopMisused, match=message):
            kept_of(torch.zeros(2), item)


def kept_of(*items: Any) -> KeptObjects:
    kept = KeptObjects()
    for item in items:
        kept.add(item)
    kept.begin()
    return kept


def test_objects_are_restored_to_the_beginning_of_the_step() -> None:
    tensor, numbers, module, average = (
        torch.zeros(3), {"rounds": 1, "is_good": True, "mean": 0.5}, nn.BatchNorm1d(2), Average(),
    )  # fmt: skip
    kept = kept_of(tensor, numbers, module, average)
    tensor += 1
    numbers["rounds"] = 2
    kept.keep()
    tensor += 5
    numbers.update(rounds=9, is_good=False, mean=7.0)
    module(torch.randn(4, 2))
    average.state["shadow"][0] += 1
    average.state["decay"] = 0.9
    kept.restore(kept.kept)
    assert tensor.tolist() == [1.0] * 3
    assert numbers == {"rounds": 2, "is_good": True, "mean": 0.5}
    assert type(numbers["rounds"]) is int and type(numbers["is_good"]) is bool
    assert module.num_batches_tracked == 0 and module.running_mean.tolist() == [0, 0]
    assert average.state["decay"] == 0.5 and average.state["collected"] is None
    assert average.state["shadow"][0].tolist() == [1.0, 1.0]


def test_restored_objects_do_not_share_memory_with_what_is_kept() -> None:
    shadow = {"weight": torch.zeros(2)}
    kept = kept_of(shadow)
    kept.restore(kept.kept)
    shadow["weight"] += 1
    kept.restore(kept.kept)
    assert shadow["weight"].tolist() == [0.0, 0.0]


def test_values_of_step_0_do_not_change_later() -> None:
    tensor = torch.zeros(2)
    kept = KeptObjects()
    kept.add(tensor)
    initial = kept.begin()
    tensor += 1
    kept.keep()
    assert [value.tolist() for value in initial.values()] == [[0.0, 0.0]]


def grow(kept: dict[str, Any]) -> None:
    kept["mean"] = torch.zeros(3)


def add(kept: dict[str, Any]) -> None:
    kept["other"] = 1.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [(grow, "mean has changed from shape \\(2,\\)"), (add, "other was added or removed")],
)
def test_other_shapes_and_names_are_refused(change: Any, reason: str) -> None:
    numbers = {"mean": torch.zeros(2)}
    kept = kept_of(numbers)
    change(numbers)
    with pytest.raises(LoopMisused, match=reason):
        kept.keep()


@pytest.mark.parametrize("item", [3.0, [1.0], {"name": "text"}, {"inner": {"a": 1}}])
def test_objects_whose_values_cannot_be_written_are_refused(item: Any) -> None:
    with pytest.raises(LoopMisused, match=r"run\.keep"):
        KeptObjects().add(item)


def are_shared(*states: ScriptState) -> bool:
    """Whether the workers with these states find that they agree; all of them find the same."""
    totals = [sum(numbers) for numbers in zip(*(s.fingerprint for s in states), strict=True)]
    [is_shared] = {state.is_shared(totals, len(states)) for state in states}
    return is_shared


def state_of(*items: Any) -> ScriptState:
    objects = KeptObjects()
    for item in items:
        objects.add(item)
    return ScriptState(ScriptValues([], []), objects)


@pytest.mark.parametrize(
    ("factor", "is_shared"), [(1.0, True), (1 + 1e-7, True), (1.1, False), (float("nan"), False)]
)
def test_workers_with_other_values_are_found_by_their_fingerprints(
    factor: float, is_shared: bool
) -> None:
    """A large counter beside them does not hide the difference."""
    values = torch.linspace(1, 5, 100)
    factors = (1.0, factor)
    assert are_shared(*(state_of(values * f, {"steps": 10**9}) for f in factors)) == is_shared


def test_counters_and_integers_are_compared_exactly() -> None:
    assert are_shared(state_of({"rounds": 1000}), state_of({"rounds": 1000}))
    assert not are_shared(state_of({"rounds": 1000}), state_of({"rounds": 1001}))
    assert not are_shared(state_of(torch.tensor([4000, 1])), state_of(torch.tensor([4001, 1])))
    assert are_shared(state_of({"best": float("inf")}), state_of({"best": float("inf")}))


def test_kept_tensors_are_contiguous_and_tensors_of_a_dictionary_stay_the_same() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    centres = torch.zeros(2)
    numbers: dict[str, Any] = {"image": image, "centres": centres, "best": 0}
    kept = kept_of(numbers)
    assert all(value.is_contiguous() for value in kept.kept.values())
    kept.restore(kept.kept)
    centres += 1
    numbers["best"] = 0.93
    kept.keep()
    centres += 1
    numbers["best"] = 0
    kept.restore(kept.kept)
    assert numbers["centres"] is centres and centres.tolist() == [1.0, 1.0]
    assert numbers["best"] == 0.93 and torch.equal(numbers["image"], image)


def test_arrays_and_the_state_of_a_generator_are_restored() -> None:
    generator, point = np.random.RandomState(3), np.zeros((2, 2), dtype=np.float32)
    plain, frozen = np.arange(3), np.arange(2)
    frozen.flags.writeable = False
    average = Average()
    average.state = {
        "generator": generator.get_state(),
        "point": point,
        "seen": deque([np.ones(2)], maxlen=1),
        "frozen": frozen,
    }
    kept = kept_of(plain, {"point": point}, average)
    expected = generator.rand(4)
    point += 1
    plain *= 5
    average.state = {**average.state, "generator": generator.get_state(), "frozen": frozen + 1}
    average.state["seen"].append(np.zeros(2))
    kept.restore(kept.kept)
    assert plain.tolist() == [0, 1, 2] and not point.any()
    assert average.state["frozen"].tolist() == [0, 1]
    assert average.state["seen"].maxlen == 1 and average.state["seen"][0].tolist() == [1, 1]
    generator.set_state(average.state["generator"])
    assert (generator.rand(4) == expected).all()


def test_array_of_objects_is_refused() -> None:
    with pytest.raises(LoopMisused, match="names is an array of object, which is not supported"):
        kept_of({"names": np.array(["a", None], dtype=object)})


def test_models_that_are_prepared_and_unknown_types_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(LoopMisused, match="weight belongs to a prepared model"):
        kept_of(nn.Sequential(model)).refuse_shared([model])
    with pytest.raises(LoopMisused, match="is of int16, which is not supported"):
        kept_of(torch.zeros(2, dtype=torch.int16))
    with pytest.raises(LoopMisused, match="is too large"):
        kept_of({"seed": 2**60})


class Trainer:
    """An object of a script's own class."""

    def __init__(self) -> None:
        self.average = {"weight": torch.zeros(2)}


def test_variables_that_change_and_are_not_kept_are_named() -> None:
    model, teacher, metric = nn.Linear(2, 2), nn.Linear(2, 2), nn.Module()
    metric.register_buffer("counts", torch.zeros(2))
    trainer, kept, losses, hidden = Trainer(), torch.zeros(2), [], torch.zeros(2)
    parameters, unchanged = list(model.parameters()), [torch.zeros(2), np.zeros(3)]
    seen = np.zeros((4, 2))
    carried = CarriedState(currentframe(), [model, *model.parameters()], [kept])
    assert carried.changed() == []
    with torch.no_grad():
        parameters[0] += 1
    kept += 1
    losses.append(torch.zeros(()))
    assert carried.changed() == []
    trainer.average["weight"] = trainer.average["weight"] * 0.9
    hidden += 1
    metric.counts += teacher(torch.ones(2)).detach()
    seen[1] = 2
    assert carried.changed() == ["metric", "trainer.average", "hidden", "seen"]
    hidden += 1
    assert carried.changed() == [] and unchanged


def test_variable_with_another_tensor_than_the_kept_one_is_refused() -> None:
    mean = torch.zeros(2)
    carried = CarriedState(currentframe(), [], [mean])
    mean.mul_(0.9)
    assert carried.changed() == []
    mean = 0.9 * mean
    with pytest.raises(LoopMisused, match="mean is another tensor now"):
        carried.changed()


class Patience:
    def __init__(self) -> None:
        self.best, self.num_bad, self.name, self.rounds = 0.5, 3, "first", None


@pytest.mark.parametrize("is_mapping", [False, True])
def test_named_values_are_restored_with_their_types(is_mapping: bool) -> None:
    patience = Patience()
    owner = vars(patience) if is_mapping else patience
    kept = kept_of(NamedValues(owner, ["best", "num_bad"]))
    patience.best, patience.num_bad, patience.name = 0.25, 4, "second"
    kept.restore(kept.kept)
    assert vars(patience) == {"best": 0.5, "num_bad": 3, "name": "second", "rounds": None}
    assert isinstance(patience.num_bad, int)


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        (Patience(), "worst", "there is no 'worst' yet: set it before run.keep"),
        (Patience(), "name", "'name' is str: give it a number, a tensor or an array"),
        ({"best": None}, "best", "'best' is NoneType: give it a number"),
        (3, "real", "int has no attributes to keep"),
    ],
)
def test_names_without_a_value_to_keep_are_refused(owner: Any, name: str, message: str) -> None:
    with pytest.raises(LoopMisused, match=message):
        NamedValues(owner, [name])
