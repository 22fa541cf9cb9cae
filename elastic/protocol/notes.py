"""Notes: commands that need no action, for their journal line is all. They are for readers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resharded:
    """The state is in place under the new assignment."""

    generation: int
    step: int
    source: str
    bytes_moved: int
    bytes_needed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The run continues from an older step: no live holdings cover a newer one, or for `cause`.

    In the second case the run skips the batches with the numbers `skipped_batches` from now on.
    """

    generation: int
    step: int
    from_step: int
    source: str
    cause: str = ""
    skipped_batches: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning to the user: `kind` is `skipped`, `spike`, `audit`, `notice`, `machine`,
    `health`, `straggler`, `market`, `checkpoint` or `snapshot`."""

    generation: int
    step: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """A worker drains at the next step boundary, and a standby worker takes its place."""

    worker: str
    cause: str


@dataclass(frozen=True, slots=True)
class StepTimeCompared:
    """A new layout's median step, and what was predicted for it: later predictions learn from
    it."""

    generation: int
    layout: str
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class NodeQuarantined:
    """No worker starts on a node before `until` (seconds since the epoch)."""

    node: str
    until: float
    cause: str


@dataclass(frozen=True, slots=True)
class NodeReleased:
    node: str
    cause: str


@dataclass(frozen=True, slots=True)
class MarketChosen:
    """So many workers get machines of this market, instead of the workers `withdrawn`."""

    market: str
    num_workers: int
    cause: str
    withdrawn: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Waited:
    """The run does not train, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class LayoutAnswered:
    """The answer to a layout request: a refusal, or the layout `planned` for the current workers.

    `present` is the layout under which the run trains in `generation` or is about to; empty if the
    run waits. If the two differ, a higher generation will bring the change.
    """

    generation: int
    request: str
    planned: str
    present: str
    refusal: str = ""


Note = (
    Resharded
    | RolledBack
    | Warned
    | Replaced
    | StepTimeCompared
    | NodeQuarantined
    | NodeReleased
    | MarketChosen
    | Waited
    | LayoutAnswered
)
