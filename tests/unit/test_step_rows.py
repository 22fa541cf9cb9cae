"""The metrics of steps in MLflow: every loss, and once a second the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from elastic.protocol.votes import SPLIT
from pipelines.observe.history.step_time import Device
from pipelines.observe.tracking.rows import step_metrics

NOT_KNOWN: dict[str, float] = {}


def row(step: int, step_s: float, split: Mapping[str, float] = NOT_KNOWN) -> dict[str, Any]:
    numbers = {"loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 100}
    place = {"time": 1_700_000_000.0 + step * step_s, "step": step, "generation": 1}
    return {**place, "world_size": 2, "step_s": step_s, **numbers, **split}


@pytest.mark.parametrize(("step_s", "num_rare"), [(0.125, 10), (1.0, 80), (2.5, 80)])
def test_quick_steps_have_most_metrics_once_a_second(step_s: float, num_rare: int) -> None:
    rows = [row(step, step_s) for step in range(1, 81)]
    counts = Counter(metric.key for line in rows for metric in step_metrics(line))
    assert counts["loss"] == counts["grad_norm"] == 80
    for name in ("lr", "step_s", "world_size", "generation", "tokens_per_s"):
        assert counts[name] == num_rare, name


def test_second_that_ends_between_two_steps_has_metrics() -> None:
    """A step of 0.5 s and 0.7 s of evaluation alternate: each line ends in another second."""
    split = dict.fromkeys(SPLIT, 0.2)
    rows = [{**row(step, 1.2), "step_s": 0.5, **split} for step in range(1, 31)]
    counts = Counter(metric.key for line in rows for metric in step_metrics(line))
    assert counts["lr"] == 30


def test_split_and_speed_of_a_device_are_metrics() -> None:
    split = dict.fromkeys(SPLIT, 0.5)
    device = Device("H100", step_flops=6e12, peak_flops=100e12)
    metrics = {m.key: m.value for m in step_metrics(row(1, 3.0, split), "samples", device)}
    assert {name: metrics[f"step/{name}"] for name in SPLIT} == split
    assert metrics["samples_per_s_per_device"] == pytest.approx(100 / 3.0 / 2)
    assert metrics["device_tflops"] == pytest.approx(1.0)
    assert metrics["device_mfu"] == pytest.approx(0.01)


def test_line_of_a_missing_record_has_no_numbers() -> None:
    missing = dict.fromkeys(("loss", "grad_norm", "lr", "tokens", "step_s"))
    names = {metric.key for metric in step_metrics({**row(1, 1.0), **missing})}
    assert names == {"world_size", "generation"}
