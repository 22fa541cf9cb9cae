"""The request of `elastic simulate`, as its command line gives it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimulateRequest:
    """The options of `elastic simulate`; None where the command line has a default or none."""

    trace: str | None = None
    generate: str | None = None
    workers: str | None = None
    layout: str | None = None
    steps: int | None = None
    step_s: float | None = None
    batch: int | None = None
    state_bytes: float | None = None
    workers_per_node: int = 1
    notice_s: float = 0.0
    from_run: str | None = None
    """The name of a run in `storage` whose costs count."""
    storage: str = "runs"
    costs: str | None = None
    """The path of a JSON file of cost settings."""
    cost: tuple[str, ...] = ()
    """Cost settings as `key=value`."""
    price: float | None = None
    changes: tuple[str, ...] = ()
    compare: tuple[str, ...] = ()
    """Settings with several values, as `key=value,value`."""
    json: str | None = None
    plot: str | None = None
