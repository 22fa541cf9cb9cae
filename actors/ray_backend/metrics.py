"""Metrics of a run in Ray, which exports them to Prometheus on every node of the cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ray.util.metrics import Gauge

DESCRIPTION = "of a run of the elastic training platform; see docs/status.md"
TAGS = ("run", "place")


@dataclass(frozen=True)
class Metric:
    """One current number of a run; None is not shown. `place` distinguishes metrics of one name."""

    name: str
    value: float | None
    place: str = ""


class Gauges:
    """Shows metrics under the name of their run, until this process ends."""

    def __init__(self, run_name: str) -> None:
        self._run_name = run_name
        self._gauges: dict[str, Gauge] = {}

    def show(self, metrics: Iterable[Metric]) -> None:
        for metric in metrics:
            if metric.name not in self._gauges:
                self._gauges[metric.name] = Gauge(metric.name, DESCRIPTION, TAGS)
            tags = {"run": self._run_name, "place": metric.place}
            self._gauges[metric.name].set(metric.value, tags)
