"""Figures of a run as Ray's metrics, which Prometheus reads from every node of the cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ray.util.metrics import Gauge

DESCRIPTION = "of a run of the elastic training platform; docs/status.md says what it is"
TAGS = ("run", "place")


@dataclass(frozen=True)
class Metric:
    """One number about a run at present; None is not shown. `place` tells several of a name
    apart."""

    name: str
    value: float | None
    place: str = ""


class Gauges:
    """Shows figures under the name of their run; they go when this process does."""

    def __init__(self, run_name: str) -> None:
        self._run_name = run_name
        self._gauges: dict[str, Gauge] = {}

    def show(self, figures: Iterable[Metric]) -> None:
        for figure in figures:
            if figure.name not in self._gauges:
                self._gauges[figure.name] = Gauge(figure.name, DESCRIPTION, TAGS)
            tags = {"run": self._run_name, "place": figure.place}
            self._gauges[figure.name].set(figure.value, tags)
