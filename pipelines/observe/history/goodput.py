"""Goodput accounting: a run's time as compute, redone, paused and waiting, from its journal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.protocol.wire import is_opening, is_progress, is_steps, steps_in

ACTIVITIES = ("compute", "redone", "paused", "waiting", "undriven", "nothing")
READ_EVERY_S = 60.0
MAX_READINGS = 4096
"""Readings kept: almost three days; older ones are dropped."""
MAX_SPANS = 1024
"""With more spans of steps the older ones are merged, and share one compute time."""


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """The time of a run in seconds; compute, redone, paused and waiting add up to the total."""

    compute_s: float = 0.0
    """In committed steps and in the work between them, such as an evaluation."""
    redone_s: float = 0.0
    """In steps that a rollback has undone."""
    paused_s: float = 0.0
    """From a step boundary, or the last step before an abort, to the begin of the next step."""
    waiting_s: float = 0.0
    """Starting, with too few workers, or without a driver."""
    undriven_s: float = 0.0
    """The part of the waiting time without a driver."""

    @property
    def wall_s(self) -> float:
        return self.compute_s + self.redone_s + self.paused_s + self.waiting_s

    @property
    def goodput(self) -> float | None:
        """The share of compute in the time with a driver."""
        driven_s = self.wall_s - self.undriven_s
        return self.compute_s / driven_s if driven_s > 0 else None


@dataclass(slots=True)
class WorkerTime:
    """Worker-seconds from `WorkerReady` to the loss of each worker, by place: the type of its node
    if the journal has it, else the node."""

    _spent: dict[str, float] = field(default_factory=dict)
    _there: dict[str, tuple[str, float]] = field(default_factory=dict)
    """The place of each live worker, and since when it is there."""
    _heard: float = 0.0
    """The time of the last line."""

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
        """Worker-seconds by place, most first, as of `now` or of the last line."""
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
    """The account at the time of a journal line; `step` is the newest committed step."""

    time: float
    step: int
    split: TimeSplit
    worker_s: float


@dataclass(slots=True)
class Span:
    """Committed steps after `begin` up to `end`, which took `compute_s` together."""

    begin: int
    end: int
    compute_s: float


@dataclass(slots=True)
class Account:
    """Accounts for a run's time, line by line of its journal; the result depends on the lines only.

    Times are those of the controller's clock; of workers' clocks only `step_s` is used, which is a
    difference. A reading is taken at the first line of each minute, and when the run stops.
    `readings` has the newest `MAX_READINGS`; `num_dropped` older ones are gone.
    """

    readings: list[Reading] = field(default_factory=list)
    num_dropped: int = 0
    workers: WorkerTime = field(default_factory=WorkerTime)
    _spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACTIVITIES, 0.0))
    _activity: str = "waiting"
    """The activity since `_mark`: one of `ACTIVITIES` except redone."""
    _mark: float | None = None
    _read_at: float = 0.0
    _heard: float = 0.0
    """The time of the last line."""
    _generation: int = 0
    """The newest generation to form; reports of others are stale."""
    _has_trained: bool = False
    """Whether a step committed in this session; until then the run is starting."""
    _has_resumed: bool = False
    """Whether a `Resume` followed the last stop of training."""
    _broken_off_s: float = 0.0
    """The part of the pause spent in an aborted step; a late report may show that it committed."""
    _spans: list[Span] = field(default_factory=list)
    """The spans of committed steps, in order."""

    def take(self, line: Mapping[str, Any]) -> None:
        """Add one journal line; a line of an unknown name only advances the time."""
        self.workers.take(line)
        name = line.get("event") or line.get("command") or ""
        if is_opening(line) or (self._activity == "nothing" and name != "RunOpened"):
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
                self._switch(time, "waiting")
            case "Paused" if line["generation"] != self._generation:
                pass
            case "Paused" | "Abort" | "Form" | "Resume":
                self._generation = line["generation"]
                self._switch(time, "paused" if self._has_trained else "waiting")
                if name == "Resume":
                    self._has_resumed, self._broken_off_s = True, 0.0
                    self._roll_back(line["step"])
            case "RolledBack":
                self._roll_back(line["step"])
            case "StepCommitted" | "RolledForward":
                self._commit(time, [line["record"]])
            case "Quiesced" | "RecordsSent":
                self._commit(time, line["records"])
            case "Stopped":
                self._switch(time, "nothing")
            case "" if is_progress(line):
                self._catch_up(time, line["generation"], line["step"])
        self._hear(time, is_last=name == "Stopped")

    def split(self, now: float | None = None) -> TimeSplit:
        """The split as of `now` or of the last line; a stopped run spends no more time."""
        spent = dict(self._spent)
        if self._mark is not None:
            until = self._heard if now is None else max(now, self._heard)
            spent[self._activity] += until - self._mark
        return TimeSplit(
            compute_s=spent["compute"],
            redone_s=spent["redone"],
            paused_s=spent["paused"],
            waiting_s=spent["waiting"] + spent["undriven"],
            undriven_s=spent["undriven"],
        )

    @property
    def num_readings(self) -> int:
        """The number of readings taken, including the dropped ones."""
        return self.num_dropped + len(self.readings)

    def readings_from(self, number: int) -> list[Reading]:
        """The kept readings from this number on, counted from 0."""
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
        """A controller takes the run; since the last line of the previous one nothing drove it."""
        self._switch(self._heard, "undriven")
        self._switch(time, "waiting")
        self._has_trained = False

    def _switch(self, time: float, activity: str) -> None:
        """Training stops and another activity begins; the unfinished step counts as paused."""
        assert self._mark is not None
        since_s = time - self._mark
        if self._activity == "compute":
            self._broken_off_s = since_s
            self._spent["paused"] += since_s
        elif self._activity != "nothing":
            self._spent[self._activity] += since_s
        self._activity, self._mark, self._has_resumed = activity, time, False

    def _commit(self, time: float, records: Iterable[Mapping[str, Any]]) -> None:
        """Add committed steps; several workers may report the same step."""
        for record in records:
            self._add(time, record["generation"], record["step"], record["step_s"] or 0.0)

    def _take_steps(self, line: Mapping[str, Any]) -> None:
        """Add the steps of a line that has a time for each."""
        for time, generation, step, step_s in steps_in(line):
            self._heard = max(self._heard, time)
            self._add(self._heard, generation, step, step_s)

    def _add(self, time: float, generation: int, step: int, step_s: float) -> None:
        if generation == self._generation and step > self._last_step:
            self._add_span(step - 1, step, self._compute_s(time, step_s))

    def _catch_up(self, time: float, generation: int, step: int) -> None:
        """Add the steps before a full state, which have no lines: the time since is theirs."""
        is_current = generation == self._generation and step > self._last_step
        if is_current and self._activity == "compute":
            assert self._mark is not None
            begin = self._last_step
            self._add_span(begin, step, self._compute_s(time, time - self._mark))

    def _add_span(self, begin: int, end: int, compute_s: float) -> None:
        self._spans.append(Span(begin, end, compute_s))
        if len(self._spans) > MAX_SPANS:
            old, new = self._spans[: MAX_SPANS // 2], self._spans[MAX_SPANS // 2 :]
            self._spans = [*_merged(old), *new]

    def _compute_s(self, time: float, step_s: float) -> float:
        """Account for the time of a committed step, and return it."""
        assert self._mark is not None
        if not self._has_resumed and self._activity != "compute":
            compute_s = min(step_s, self._broken_off_s)
            self._broken_off_s -= compute_s
            self._spent["paused"] -= compute_s
        else:
            since_s = time - self._mark
            compute_s = since_s if self._activity == "compute" else min(step_s, since_s)
            if self._activity != "compute":
                self._spent[self._activity] += since_s - compute_s
            self._activity, self._mark, self._has_trained = "compute", time, True
        self._spent["compute"] += compute_s
        return compute_s

    def _roll_back(self, step: int) -> None:
        """Count the steps after this one as redone, also those in a part of a span."""
        while self._last_step > step:
            span = self._spans.pop()
            kept = max(0, step - span.begin) / (span.end - span.begin)
            if kept:
                self._spans.append(Span(span.begin, step, kept * span.compute_s))
            self._spent["compute"] -= (1 - kept) * span.compute_s
            self._spent["redone"] += (1 - kept) * span.compute_s


def _merged(spans: Sequence[Span]) -> Iterator[Span]:
    """Merge pairs of adjacent spans."""
    spans = list(spans)
    while spans:
        first = spans.pop(0)
        if spans and spans[0].begin == first.end:
            second = spans.pop(0)
            first = Span(first.begin, second.end, first.compute_s + second.compute_s)
        yield first
