"""Goodput: where a run's time has gone, from its journal: compute, redone, paused, waiting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.wire import is_opening, is_progress, is_steps, steps_in

DOINGS = ("compute", "redone", "paused", "waiting", "undriven", "nothing")
READ_EVERY_S = 60.0
MAX_READINGS = 4096
"""Almost three days of them; older ones are dropped."""
MAX_SPANS = 1024
"""Of more spans of steps, the older ones are merged: their compute is then known only together."""


@dataclass(frozen=True, slots=True)
class Split:
    """Seconds since a run began: compute, redone, paused and waiting add up to all of them."""

    compute_s: float = 0.0
    """In steps that stand, and in what goes on between them, such as an evaluation."""
    redone_s: float = 0.0
    """In steps that a fall-back has taken back."""
    paused_s: float = 0.0
    """From a boundary, or from the last step before an abort, to the begin of the next step."""
    waiting_s: float = 0.0
    """Starting, without enough workers, or driven by nobody."""
    undriven_s: float = 0.0
    """So much of the waiting: nobody drove the run."""

    @property
    def wall_s(self) -> float:
        return self.compute_s + self.redone_s + self.paused_s + self.waiting_s

    @property
    def goodput(self) -> float | None:
        """The share of compute in the time that the run was driven."""
        driven_s = self.wall_s - self.undriven_s
        return self.compute_s / driven_s if driven_s > 0 else None


@dataclass(slots=True)
class WorkerTime:
    """How long workers were there, from `WorkerReady` to their loss, by the place they were at:
    the type of their node if the journal tells it, else the node."""

    _spent: dict[str, float] = field(default_factory=dict)
    _there: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Where each worker is, and since when."""
    _heard: float = 0.0

    def take(self, line: Mapping[str, Any]) -> None:
        name = line.get("event") or line.get("command") or ""
        time = max(self._heard, line["time"])
        match name:
            case "RunOpened":
                self._leave(tuple(self._there), self._heard)
            case "WorkerReady":
                place = line.get("node_type") or line["node"]
                self._there.setdefault(line["worker"], (place, time))
            case "WorkerLost" | "StopWorker":
                self._leave([line["worker"]], time)
            case "Stopped":
                self._leave(tuple(self._there), time)
        self._heard = time

    def by_place(self, now: float | None = None) -> dict[str, float]:
        """Worker-seconds by place, most first, as of `now`, or of the last line."""
        until = self._heard if now is None else max(now, self._heard)
        spent = dict(self._spent)
        for place, since in self._there.values():
            spent[place] = spent.get(place, 0.0) + until - since
        return dict(sorted(spent.items(), key=lambda entry: -entry[1]))

    def _leave(self, workers: Iterable[str], time: float) -> None:
        for worker in workers:
            if worker in self._there:
                place, since = self._there.pop(worker)
                self._spent[place] = self._spent.get(place, 0.0) + time - since


@dataclass(frozen=True, slots=True)
class Reading:
    """The account at the time of a journal line; `step` was the newest that stood."""

    time: float
    step: int
    split: Split
    worker_s: float


@dataclass(slots=True)
class Span:
    """The steps after `begin` up to `end` stand, and took `compute_s` together."""

    begin: int
    end: int
    compute_s: float


@dataclass(slots=True)
class Account:
    """Folds a journal, line by line; the same lines always give the same splits and readings.

    Time is the controller's; of workers' clocks only `step_s` is taken, a difference. `readings`
    are taken once a minute of that time, as far as there are lines, and when the run stops; the
    newest `MAX_READINGS` are kept, after `num_dropped` others.
    """

    readings: list[Reading] = field(default_factory=list)
    num_dropped: int = 0
    workers: WorkerTime = field(default_factory=WorkerTime)
    _spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(DOINGS, 0.0))
    _doing: str = "waiting"
    """What the time since `_mark` is spent on: one of `DOINGS`, but not redone."""
    _mark: float | None = None
    _read_at: float = 0.0
    _heard: float = 0.0
    """The time of the last line."""
    _generation: int = 0
    """The newest that was to be formed: what others tell is stale."""
    _has_trained: bool = False
    """In this session; before, it is starting."""
    _has_resumed: bool = False
    """Since training last stopped."""
    _broken_off_s: float = 0.0
    """So much of the pause went into steps that seemed lost; late reports may tell otherwise."""
    _spans: list[Span] = field(default_factory=list)
    """Of the steps that stand, in order."""

    def take(self, line: Mapping[str, Any]) -> None:
        """Fold one journal line in; one of an unknown name changes nothing but the time."""
        self.workers.take(line)
        name = line.get("event") or line.get("command") or ""
        if is_opening(line) or (self._doing == "nothing" and name != "RunOpened"):
            return
        time = max(self._heard, line["time"])
        if self._mark is None:
            self._mark = self._heard = self._read_at = time
        if is_steps(line):
            self._take_steps(line)
        match name:
            case "RunOpened":
                self._open(time)
            case "Waited":
                self._stand(time, "waiting")
            case "Paused" if line["generation"] != self._generation:
                pass
            case "Paused" | "Abort" | "Form" | "Resume":
                self._generation = line["generation"]
                self._stand(time, "paused" if self._has_trained else "waiting")
                if name == "Resume":
                    self._has_resumed, self._broken_off_s = True, 0.0
                    self._take_back(line["step"])
            case "RolledBack":
                self._take_back(line["step"])
            case "StepCommitted" | "Settled":
                self._commit(time, [line["record"]])
            case "Quiesced" | "RecordsSent":
                self._commit(time, line["records"])
            case "Stopped":
                self._stand(time, "nothing")
            case "" if is_progress(line):
                self._catch_up(time, line["generation"], line["step"])
        self._hear(time, is_last=name == "Stopped")

    def split(self, now: float | None = None) -> Split:
        """As of `now`, or of the last line; a run that has stopped spends no more time."""
        spent = dict(self._spent)
        if self._mark is not None:
            until = self._heard if now is None else max(now, self._heard)
            spent[self._doing] += until - self._mark
        return Split(
            compute_s=spent["compute"],
            redone_s=spent["redone"],
            paused_s=spent["paused"],
            waiting_s=spent["waiting"] + spent["undriven"],
            undriven_s=spent["undriven"],
        )

    @property
    def num_readings(self) -> int:
        """How many have been taken, with those that are dropped."""
        return self.num_dropped + len(self.readings)

    def readings_from(self, number: int) -> list[Reading]:
        """Those from this one on (from 0), as far as they are kept."""
        return self.readings[max(0, number - self.num_dropped) :]

    @property
    def _last_step(self) -> int:
        return self._spans[-1].end if self._spans else 0

    def _hear(self, time: float, is_last: bool) -> None:
        self._heard = time
        if is_last or time - self._read_at >= READ_EVERY_S:
            self._read_at = time
            worker_s = sum(self.workers.by_place().values())
            self.readings.append(Reading(time, self._last_step, self.split(), worker_s))
            if len(self.readings) > MAX_READINGS:
                del self.readings[0]
                self.num_dropped += 1

    def _open(self, time: float) -> None:
        """Whoever drove the run before was last heard at his last line."""
        self._stand(self._heard, "undriven")
        self._stand(time, "waiting")
        self._has_trained = False

    def _stand(self, time: float, doing: str) -> None:
        """Nothing is trained from now on; the step that was under way is lost as it seems."""
        assert self._mark is not None
        since_s = time - self._mark
        if self._doing == "compute":
            self._broken_off_s = since_s
            self._spent["paused"] += since_s
        elif self._doing != "nothing":
            self._spent[self._doing] += since_s
        self._doing, self._mark, self._has_resumed = doing, time, False

    def _commit(self, time: float, records: Iterable[Mapping[str, Any]]) -> None:
        """Steps stand; several workers may tell of the same."""
        for record in records:
            self._add(time, record["generation"], record["step"], record["step_s"] or 0.0)

    def _take_steps(self, line: Mapping[str, Any]) -> None:
        """A line of steps: each has its own time."""
        for time, generation, step, step_s in steps_in(line):
            self._heard = max(self._heard, time)
            self._add(self._heard, generation, step, step_s)

    def _add(self, time: float, generation: int, step: int, step_s: float) -> None:
        if generation == self._generation and step > self._last_step:
            self._add_span(step - 1, step, self._compute_s(time, step_s))

    def _catch_up(self, time: float, generation: int, step: int) -> None:
        """A full state stands for steps that have no lines: all the time since was theirs."""
        is_of_now = generation == self._generation and step > self._last_step
        if is_of_now and self._doing == "compute":
            assert self._mark is not None
            begin = self._last_step
            self._add_span(begin, step, self._compute_s(time, time - self._mark))

    def _add_span(self, begin: int, end: int, compute_s: float) -> None:
        self._spans.append(Span(begin, end, compute_s))
        if len(self._spans) > MAX_SPANS:
            old, new = self._spans[: MAX_SPANS // 2], self._spans[MAX_SPANS // 2 :]
            self._spans = [*_merged(old), *new]

    def _compute_s(self, time: float, step_s: float) -> float:
        """Spend the time of a step that stands, and return it."""
        assert self._mark is not None
        if not self._has_resumed and self._doing != "compute":
            compute_s = min(step_s, self._broken_off_s)
            self._broken_off_s -= compute_s
            self._spent["paused"] -= compute_s
        else:
            since_s = time - self._mark
            compute_s = since_s if self._doing == "compute" else min(step_s, since_s)
            if self._doing != "compute":
                self._spent[self._doing] += since_s - compute_s
            self._doing, self._mark, self._has_trained = "compute", time, True
        self._spent["compute"] += compute_s
        return compute_s

    def _take_back(self, step: int) -> None:
        """Steps after this one do not stand any more; of a span a part may."""
        while self._last_step > step:
            span = self._spans.pop()
            kept = max(0, step - span.begin) / (span.end - span.begin)
            if kept:
                self._spans.append(Span(span.begin, step, kept * span.compute_s))
            self._spent["compute"] -= (1 - kept) * span.compute_s
            self._spent["redone"] += (1 - kept) * span.compute_s


def _merged(spans: Sequence[Span]) -> Iterator[Span]:
    """Each two neighbours together, where no steps lie between them."""
    spans = list(spans)
    while spans:
        first = spans.pop(0)
        if spans and spans[0].begin == first.end:
            second = spans.pop(0)
            first = Span(first.begin, second.end, first.compute_s + second.compute_s)
        yield first
