"""Numbers that are not finite are null in the journal, named to the user, and never the best."""

from __future__ import annotations

import json
from math import inf, isinf, nan

from users_policy import users_policy

from elastic.controller.core import Core
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.events import Evaluated, RunOpened, StoreReady
from elastic.protocol.phases import Aborting
from elastic.protocol.wire import decode, encode, event_line, replayed
from pipelines.observe.history.history import History


def test_evaluation_that_is_not_finite_can_be_replayed_from_the_journal() -> None:
    event = Evaluated(1, 10, None, (("accuracy", None), ("error", 0.5)), ("accuracy", "loss"))
    line = json.loads(json.dumps(event_line(1.0, event, Core().state), allow_nan=False))
    assert line["loss"] is None and line["not_finite"] == ["accuracy", "loss"]
    assert replayed(line) == event


def test_numbers_that_are_not_finite_are_encoded_as_null_and_deadlines_stay_infinite() -> None:
    encoded = encode(Aborting("lost", set(), inf, inf, 0.0))
    assert json.loads(json.dumps(encoded, allow_nan=False))["deadline"] is None
    assert isinf(decode(Aborting, encoded).deadline)
    assert encode({"value": nan, "values": [inf, -inf, 1.0]}) == {
        "value": None,
        "values": [None, None, 1.0],
    }


def test_checkpoint_without_a_finite_held_out_loss_is_never_among_the_best() -> None:
    core = Core()
    core.step(0.0, RunOpened(1, users_policy(1, 1), TargetLayout(), Job(8, steps=10)))
    core.step(0.0, StoreReady("host", 1))
    core.state.committed_step = 1
    generation = core.state.generation
    core.step(1.0, Evaluated(generation, 1, 2.5))
    assert core.state.checkpoints.held_out_losses == {"1": 2.5}
    [warned] = core.step(1.0, Evaluated(generation, 1, None, (), ("loss",)))
    assert core.state.checkpoints.held_out_losses == {}
    assert warned.kind == "not finite"  # type: ignore[union-attr]
    [warned] = core.step(1.0, Evaluated(generation, 1, None))
    assert warned.kind == "nothing counted"  # type: ignore[union-attr]


def test_history_names_the_numbers_that_are_not_finite() -> None:
    history = History()
    line = {"time": 1.0, "event": "Evaluated", "generation": 1, "step": 3, "loss": None}
    metrics = [["accuracy", None], ["error", 0.25]]
    history.take([{**line, "metrics": metrics, "not_finite": ["loss"]}], [])
    [run_event] = history.membership.run_events
    assert run_event.text == (
        "held-out loss not finite, accuracy nothing counted, error 0.25 at step 3"
    )
