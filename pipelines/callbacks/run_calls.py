"""The calls of a run's callbacks, in order, from its metrics and its journal."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from actors.controller.journal import is_step_line
from actors.storage.line_logs import LineLog
from pipelines.callbacks.records import (
    CommittedStep,
    CompletedReshard,
    HeldOutResult,
    ReceivedNotice,
    Record,
    SavedCheckpoint,
    StartedRun,
)
from pipelines.observe.history.run_folder import RunFolder, Tail

NOTICES = {
    "WorkerDraining": "worker draining",
    "NodeDraining": "node draining",
    "NodeAtRisk": "node at risk",
}


@dataclass(frozen=True)
class Call:
    """A method of callbacks, and its argument."""

    method: str
    record: Record


@dataclass(frozen=True)
class PlacedCall:
    """A call for a line of the journal, and its place among the steps."""

    call: Call
    generation: int
    step: int | None
    """The call follows this step; None if only its time is known."""
    time: float
    begins_generation: bool = False

    def follows(self, row: Mapping[str, Any]) -> bool:
        """Whether a line of metrics comes before this call."""
        if self.begins_generation:
            return bool(row["generation"] < self.generation)
        if self.step is None:
            return bool(row["generation"] <= self.generation and row.get("time", 0) <= self.time)
        return (row["generation"], row["step"]) <= (self.generation, self.step)


class RunCalls:
    """Follows a run that is about to start; the lines of earlier sessions are skipped.

    The journal is synced before a generation trains, but has most steps up to 30 s late. So steps
    are taken from the metrics, everything else from the journal.
    """

    def __init__(self, folder: RunFolder, recipe: Mapping[str, Any]) -> None:
        """Call it before the run is started. Raises OSError."""
        self._folder = folder
        self._recipe = recipe
        self._metrics = Tail(folder.metrics, end_of(folder.metrics))
        self._journal = Tail(folder.journal, end_of(folder.journal))
        self._rows: deque[dict[str, Any]] = deque()
        self._calls: deque[PlacedCall] = deque()
        self._old_generations: int | None = None
        """The newest generation of earlier sessions; None until the controller has the run."""
        self._num_steps = 0
        self._has_begun = False
        self._newest = (0, 0)
        """Generation and step of the newest line of metrics."""
        newest_row = next(filter(is_step_line, folder.metrics.last_rows(1)), {"step": 0})
        self._step: int = newest_row["step"]
        self._seen: set[Hashable] = set()
        """What a restarted controller may report again."""
        self._nodes: dict[str, str] = {}
        """The node of each worker."""
        self._time = 0.0
        self._reshard: Mapping[str, Any] = {}
        self._rollback: Mapping[str, Any] = {}

    @property
    def is_opened(self) -> bool:
        """Whether a controller has taken the run."""
        return self._old_generations is not None

    @property
    def step(self) -> int:
        """The step at which the run is, as far as it has been read."""
        return self._step

    def read(self, is_last: bool = False) -> Iterator[Call]:
        """The calls that are due now, all of them if the run has ended. Raises OSError."""
        has_more = True
        while has_more:
            # The journal has each generation before its steps: so that no step is read without its
            # generation, the steps are read first.
            has_more = bool(block := self._metrics.read())
            self._rows.extend(filter(is_step_line, block))
            for line in self._journal.drain():
                with suppress(KeyError, TypeError, ValueError, AttributeError):  # a damaged line
                    self._take(line)
            if self._has_begun:
                yield from self._in_order()
        if is_last and self.is_opened:
            self._start({})
            while self._calls:
                yield self._calls.popleft().call

    def _in_order(self) -> Iterator[Call]:
        while self._rows or self._calls:
            if self._calls and self._is_due(self._calls[0]):
                due = self._calls.popleft()
                if due.begins_generation and due.step is not None:
                    self._step = due.step
                yield due.call
            elif self._rows:
                yield from self._committed_step(self._rows.popleft())
            else:
                return

    def _is_due(self, placed: PlacedCall) -> bool:
        if self._rows:
            return not placed.follows(self._rows[0])
        if isinstance(placed.call.record, CompletedReshard):
            # Steps that a rollback undoes have been committed before it.
            undone = placed.call.record.rolled_back_from
            return self._step >= (undone if undone is not None else placed.call.record.step)
        is_start = placed.begins_generation
        return is_start or placed.step is None or self._step >= placed.step

    def _committed_step(self, row: dict[str, Any]) -> Iterator[Call]:
        """Skip lines of earlier sessions, and those that a controller has written again."""
        generation, step = row["generation"], row["step"]
        assert self._old_generations is not None
        newest_generation, newest_step = self._newest
        is_again = generation == newest_generation and step <= newest_step
        if generation <= self._old_generations or generation < newest_generation or is_again:
            return
        self._newest, self._step = (generation, step), step
        metrics = {name: value for name, value in row.items() if name != "reported"}
        reported = row.get("reported", {})
        yield Call(
            "on_step",
            CommittedStep(
                number=step,
                loss=row.get("loss"),
                metrics={**metrics, **reported},
                reported=reported,
                generation=generation,
                world_size=row.get("world_size", 0),
                time=row.get("time", self._time),
            ),
        )

    def _take(self, line: dict[str, Any]) -> None:
        """Take a line of the journal; most are no calls."""
        name = line.get("event") or line.get("command") or ""
        if name == "RunOpened":
            self._num_steps = line.get("job", {}).get("steps", 0)
            if self._old_generations is None:
                self._old_generations = line.get("newest_generation", 0)
        if not self.is_opened:
            return
        self._time = line["time"]
        match name:
            case "WorkerReady":
                self._nodes[line["worker"]] = line["node"]
            case "WorkerLost":
                self._nodes.pop(line["worker"], None)
            case "Resharded":
                self._reshard = line
            case "RolledBack":
                self._rollback = line
            case "Resume":
                self._resume(line)
            case "Evaluated" | "Checkpointed":
                self._place_after_step(name, line)
            case "WorkerDraining" | "NodeDraining" | "NodeAtRisk":
                self._notice(name, line)

    def _resume(self, line: dict[str, Any]) -> None:
        generation, step = line["generation"], line["step"]
        if self._is_repeated("Resume", generation):
            return
        undone, self._rollback = self._rollback.get("from_step"), {}
        if not self._has_begun:
            self._start(line)
            return
        reshard = self._reshard if self._reshard.get("generation") == generation else {}
        record = CompletedReshard(
            generation=generation,
            step=step,
            rolled_back_from=undone if undone is not None and undone > step else None,
            layout=line["layout"],
            workers=tuple(line["workers"]),
            source=reshard.get("source", ""),
            bytes_moved=reshard.get("bytes_moved", 0),
            seconds=reshard.get("seconds", 0.0),
            time=line["time"],
        )
        self._calls.append(
            PlacedCall(Call("on_reshard", record), generation, step, line["time"], True)
        )

    def _start(self, line: Mapping[str, Any]) -> None:
        """Put the start before all other calls, once; `line` is the first generation's, or empty if
        the run has ended before."""
        if self._has_begun:
            return
        self._has_begun = True
        generation, step = line.get("generation", 0), line.get("step", self._step)
        run = StartedRun(
            name=self._folder.name,
            folder=self._folder.url,
            began=next((row["time"] for row in self._folder.journal.rows()), self._time),
            step=step,
            num_steps=self._num_steps,
            generation=generation,
            layout=line.get("layout", ""),
            workers=tuple(line.get("workers", ())),
            recipe=self._recipe.get("recipe", ""),
            settings=self._recipe.get("settings", {}),
        )
        placed = PlacedCall(Call("on_start", run), generation, step, self._time, True)
        self._calls.appendleft(placed)

    def _place_after_step(self, name: str, line: dict[str, Any]) -> None:
        generation, step, time = line["generation"], line["step"], line["time"]
        if self._is_repeated(name, generation, step):
            return
        if name == "Checkpointed":
            call = Call("on_checkpoint", SavedCheckpoint(step, generation, line["path"], time))
        else:
            metrics = dict(line.get("metrics", ()))
            call = Call("on_evaluation", HeldOutResult(step, line["loss"], metrics, time))
        self._calls.append(PlacedCall(call, generation, step, time))

    def _notice(self, name: str, line: dict[str, Any]) -> None:
        worker, cause = line.get("worker"), line.get("cause", "")
        node = line.get("node") or self._nodes.get(worker or "", "")
        if self._is_repeated(name, worker, node, line.get("deadline"), cause):
            return
        on_node = (name for name, its_node in self._nodes.items() if its_node == node)
        workers = (worker,) if worker else tuple(on_node)
        record = ReceivedNotice(
            NOTICES[name], node, workers, line.get("deadline"), cause, line["time"]
        )
        call = Call("on_notice", record)
        self._calls.append(PlacedCall(call, line["generation"], None, line["time"]))

    def _is_repeated(self, *key: Hashable) -> bool:
        is_repeated = key in self._seen
        self._seen.add(key)
        return is_repeated


def end_of(log: LineLog) -> int:
    """The byte after the last whole line of a log. Raises OSError."""
    offset, line = next(log.lines_from_end(), (-1, b""))
    return offset + len(line) + 1
