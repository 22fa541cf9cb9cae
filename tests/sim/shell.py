"""A simulated controller: a process that runs the real shell through simulated time.

While the shell waits for an event, or sleeps before a retry, the rest of the world goes on. Death
strikes at a part of the shell: as it writes a line, makes lines durable, executes a command or
waits. So the order of these is the shell's own.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf, nextafter
from random import Random

from memory_storage import MemoryStorage
from sim.logs import CommandKey, SimLease, SimLines, SimLog, WriterHooks, key_of

from actors.controller.fleet import Fleet, Survivors
from actors.controller.shell import Shell
from actors.controller.shell_parts import ShellParts, StorageOrders
from actors.simulation.inbox import NoDetector, SimulatedInbox
from actors.simulation.timeline import Timeline
from actors.storage.checkpoint_files import FoundCheckpoints
from actors.storage.file_names import JOURNAL, METRICS
from elastic.controller.core import Core
from elastic.protocol.commands import Command, RecordStep, Stopped
from elastic.protocol.controller_events import ControllerRaised
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import Event, RunOpened, Woke
from elastic.protocol.votes import StepRecord
from elastic.replay.journal_lines import SILENT
from elastic.replay.replay import Replay

MAX_WAKES_AT_ONCE = 3
Check = Callable[[float, Event, list[Command], Core], None]


class ControllerDied(BaseException):
    """In the place of SIGKILL."""


class CheckFailed(BaseException):
    """A failed check; no guard of the shell takes it for an exception of the controller."""


class InjectedError(Exception):
    """An exception that a fault raises in the controller."""


@dataclass
class Death:
    """How far a controller gets with the next event before it dies: this many journal lines, then
    this many commands; with `at_durable`, all lines, but not to the end of `make_durable`."""

    num_lines: int
    num_commands: int
    then: Callable[[], None]
    at_durable: bool = False
    has_begun: bool = False


@dataclass
class Records:
    """What outlives a controller: the journal, the metrics, and a trace for people."""

    keeps_lines: bool
    random: Random
    """Draws which lines are lost with a controller."""
    storage: MemoryStorage = field(default_factory=MemoryStorage)
    trace: list[tuple[float, Event, list[Command], str]] = field(default_factory=list)
    _first: dict[tuple[int, int], StepRecord] = field(default_factory=dict)
    """The first report of each step, by generation and step."""

    def __post_init__(self) -> None:
        self.journal_log = SimLog(self.storage, JOURNAL, self.keeps_lines)
        self.metrics_log = SimLog(self.storage, METRICS, is_kept=True)

    @property
    def logs(self) -> tuple[SimLog, SimLog]:
        return self.journal_log, self.metrics_log

    @property
    def journal(self) -> list[str] | None:
        return self.journal_log.texts() if self.keeps_lines else None

    @property
    def metrics(self) -> list[StepRecord]:
        return [StepRecord(**line) for line in self.metrics_log.lines]

    def note(self, command: RecordStep) -> None:
        """Compare the reports of a step: the times of two workers differ. A record that no
        worker has any more may have been written before the controller died."""
        record = command.record
        earlier = self._first.setdefault((record.generation, record.step), record)
        if earlier is record:
            return
        first, same = (replace(r, time=0.0, step_s=0.0) for r in (earlier, record))
        assert first == same or record.missing, "invariant 8: two reports of a step differ"


class CheckedCore(Core):
    """The real core; every event is traced and checked."""

    def __init__(self, state: ControllerState, process: ControllerProcess) -> None:
        super().__init__(state)
        self._process = process
        self.newest_deadline: float | None = None
        """The last answer of `next_deadline`."""

    def next_deadline(self) -> float | None:
        self.newest_deadline = super().next_deadline()
        return self.newest_deadline

    def step(self, now: float, event: Event) -> list[Command]:
        self._process.begin_event(now, event)
        commands = super().step(now, event)
        self._process.note_decision(now, event, commands, self)
        return commands


class ControllerProcess:
    """One controller, from its start to its death or to the run's end."""

    def __init__(
        self,
        timeline: Timeline,
        records: Records,
        check: Check,
        find_checkpoints: Callable[[], FoundCheckpoints],
        horizon_s: float,
        look_every_s: float,
        epoch: int,
        since: int,
    ) -> None:
        """`since` is the epoch of the first controller of the same actor. Reads what earlier
        controllers have written. The run must end by `horizon_s`."""
        self._look_every_s = look_every_s
        self.is_dead = False
        self.raises_in_core = self.raises_in_command = False
        """Whether the next event or command raises, once."""
        self._timeline = timeline
        self._records = records
        self._check = check
        self._find_checkpoints = find_checkpoints
        self._horizon_s = horizon_s
        self._death: Death | None = None
        self._wakes: deque[float] = deque(maxlen=MAX_WAKES_AT_ONCE)
        self._decided: list[Command] = []
        for log in records.logs:
            log.begin_writer(epoch)
        lease = SimLease(epoch, since, lambda: records.journal_log.newest_epoch)
        self.shell = Shell(records.storage, lease, parts=self._parts())

    def _parts(self) -> ShellParts:
        def now() -> float:
            return self._timeline.now

        about = (now, self.wait, lambda: self.is_dead)
        journal_hooks = WriterHooks(*about, self._pass_line, self._pass_durable)
        metrics_hooks = WriterHooks(*about, self._pass_command, lambda: None)
        journal, metrics = self._records.logs
        return ShellParts(
            wall=now,
            monotonic=now,
            sleep=self.wait,
            look_every_s=self._look_every_s,
            make_core=lambda state: CheckedCore(state, self),
            make_inbox=lambda: SimulatedInbox(self),
            open_journal=lambda _, lease: SimLines(journal, lease, journal_hooks),
            open_metrics=lambda _, lease: SimLines(metrics, lease, metrics_hooks),
            find_checkpoints=lambda _: self._find_checkpoints(),
            open_detector=lambda *_: NoDetector(),
            open_publisher=lambda *_: self._publisher,
            open_compactor=lambda *_: None,
        )

    @property
    def now(self) -> float:
        return self._timeline.now

    @property
    def newest_deadline(self) -> float | None:
        return self.core.newest_deadline

    @property
    def core(self) -> CheckedCore:
        core = self.shell._core
        assert isinstance(core, CheckedCore)
        return core

    @property
    def outcome(self) -> Stopped | None:
        return self.shell.outcome

    def post(self, event: Event) -> None:
        """An event arrives."""
        if not self.is_dead:
            self.shell.post(event)

    def run(
        self,
        fleet: Fleet,
        publisher: StorageOrders,
        opening: RunOpened,
        survivors: Survivors | None,
    ) -> Stopped:
        """Run to the run's end. Raises `ControllerDied`, `CheckFailed` and `LeaseLost`."""
        self._publisher = publisher
        with self.shell.listening() as commands:
            outcome = self.shell.run(fleet, opening, survivors)
        published = [commands.get_nowait() for _ in range(commands.qsize())]
        decided, heard = Counter(map(id, self._decided)), Counter(map(id, published))
        if decided != heard:
            raise CheckFailed(f"listeners heard {len(published)} of {len(self._decided)} commands")
        return outcome

    def die(self) -> None:
        """The process is gone: whatever it does next raises `ControllerDied`."""
        if not self.is_dead:
            self.is_dead = True
            for log in self._records.logs:
                log.end_writer(self._records.random, self._timeline.now)

    def die_at_next_event(self, death: Death) -> None:
        """The process dies while it handles the next event."""
        self._death = death

    def wait(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Let time pass for the rest of the world."""
        timeline = self._timeline
        until = max(timeline.now + seconds, nextafter(timeline.now, inf))
        try:
            timeline.run(min(until, self._horizon_s), lambda: self.is_dead or is_over())
        except Exception as error:
            raise CheckFailed(f"{type(error).__name__}: {error}") from error
        if self.is_dead:
            raise ControllerDied
        if not is_over():
            if until > self._horizon_s:
                raise CheckFailed(f"invariant 9: the run does not end: {self.core.state.phase}")
            timeline.now = until

    def execute(self, key: CommandKey) -> None:
        """A command reaches a part of the shell."""
        self._pass_command()
        self._records.journal_log.check_durable(key)
        if self.raises_in_command:
            self.raises_in_command = False
            raise InjectedError(f"in {key[0]}")

    def begin_event(self, now: float, event: Event) -> None:
        """The core is about to handle an event."""
        if self._death and not self._death.num_lines:
            self._die(self._death)
        if isinstance(event, ControllerRaised) and not event.message.startswith("InjectedError"):
            raise CheckFailed(f"{event.message}\n{event.traceback}")
        if isinstance(event, Woke):
            if list(self._wakes) == [now] * MAX_WAKES_AT_ONCE:
                raise CheckFailed("invariant 9: the core spins")
            self._wakes.append(now)

    def note_decision(self, now: float, event: Event, commands: list[Command], core: Core) -> None:
        """The core has handled an event."""
        if self.raises_in_core:
            self.raises_in_core = False
            core.state.committed_step += 1000
            raise InjectedError(f"at {type(event).__name__}")
        if self._death:
            self._death.has_begun = True
        self._records.trace.append((now, event, commands, type(core.state.phase).__name__))
        self._decided += commands
        try:
            self._check(now, event, commands, core)
            for command in commands:
                if isinstance(command, RecordStep):
                    self._records.note(command)
        except Exception as error:
            raise CheckFailed(str(error)) from error
        journal = self._records.journal_log
        if not journal.refuses(self._timeline.now):  # else training goes on without the journal
            journal.expect(key_of(c) for c in commands if not isinstance(c, SILENT))

    def end_event(self) -> None:
        """The shell has handled an event to its end."""
        if self._death and self._death.has_begun:
            self._die(self._death)

    def _pass_line(self) -> None:
        if self._death:
            if not self._death.num_lines:
                self._die(self._death)
            self._death.num_lines -= 1

    def _pass_durable(self) -> None:
        if self._death and self._death.has_begun and self._death.at_durable:
            self._die(self._death)

    def _pass_command(self) -> None:
        if self._death and self._death.has_begun:
            if not self._death.num_commands:
                self._die(self._death)
            self._death.num_commands -= 1

    def _die(self, death: Death) -> None:
        self._death = None
        self.die()
        death.then()
        raise ControllerDied


def replay(lines: Iterable[str]) -> Replay:
    """Replay a journal in memory, all of it."""
    replay = Replay()
    for text in lines:
        replay.take(json.loads(text))
    return replay


def replay_newest(lines: list[str]) -> Replay:
    """Replay from the newest full state on, as `actors/controller/journal.py` does."""
    begins = [index for index, text in enumerate(lines) if '"ControllerState"' in text]
    return replay(lines[begins[-1] if begins else 0 :])
