"""The language of the scenario files: events, line by line, and the core's answers.

A line without indentation is an event. The indented lines below it are the core's answer: its
commands and, after `=`, the phase that it enters. `#` begins a comment. Words in capitals are
placeholders:

    run workers=MIN:MAX steps=N [checkpoint_every=N] [layout=L] [microbatches=N] [state_bytes=N]
        [snapshot_every=N] [snapshot_redundancy=xor:K] [max_skipped=N] [spike_factor=F]
        [spike_window=N] [audit_every=N] [audit_rollback=1]
    open [saved STEP gG ...]            a controller opens the run
    restarted after SECONDS             the controller alone died and is back; the core is woken
    store ready | store lost
    ready W... [on NODE] [with BYTES]   workers have warmed up
    lost W... CAUSE: | suspected W... | draining W...
    node_draining NODE [in SECONDS] | node_at_risk NODE    a notice for a node; 30 seconds ahead
    formed W... | moved W...            groups are formed; the state is resharded
    steps 3..7 [whole] [save_requested] [writing] [skipped] [loss X]
                                        world rank 0 reports committed steps;
                                        `whole`: all snapshots were whole; `save_requested`: a
                                        checkpoint was requested; `writing`: a part was being
                                        written
    paused W... at 7
    audited 10 [W... | W...]            replicas were compared; those of one group are equal
    snapshot_server ready NODE | snapshot_server lost NODE
    snapshot_server reported NODE W... at 6..7 [gG]    its whole snapshots, and the parities of all
                                        snapshot sets that contain the first worker
    quiesced W... at 7 [saw 8] [gradients] [torn] [records 6..7]
    rolled_forward W... at 8           workers have rolled forward
    sent W... [records 6..7] [saw 7]    records of steps that the core requested
    damaged W 4 [gG]                    a worker found a flipped bit in that checkpoint
    raised W KIND | written W... step 4 [gG] | failed W step 4 | checkpointed 4 [gG]
    reshard LAYOUT                      a user requests another target layout
    stop | wake                         `wake` is at the core's own deadline

Reports of workers carry the current generation, unless `gG` names another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from sim.reporting import command_in_words, phase_in_words
from users_policy import quiet_policy

from elastic.controller.core import Core
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Command, RecordStep, StartSnapshots
from elastic.protocol.controller_events import ControllerRestarted
from elastic.protocol.events import (
    Audited,
    CheckpointDamaged,
    Checkpointed,
    Event,
    GroupFormed,
    LayoutRequested,
    NodeAtRisk,
    NodeDraining,
    PartFailed,
    PartFile,
    PartWritten,
    Paused,
    Quiesced,
    RolledForward,
    RunOpened,
    Saved,
    StateReady,
    StepCommitted,
    StopRequested,
    StoreLost,
    StoreReady,
    Woke,
    WorkerDraining,
    WorkerLost,
    WorkerRaised,
    WorkerReady,
    WorkerSuspected,
)
from elastic.protocol.snapshot_events import (
    SnapshotServerLost,
    SnapshotServerReady,
    SnapshotServerReported,
)
from elastic.protocol.step_records import RecordsSent
from elastic.protocol.votes import StepRecord, Vote
from elastic.reshard.snapshot_placement import ParitySlot, Slot, SnapshotServer

KEYWORDS = ("at", "saw", "records", "step", "saved", "on", "with", "loss", "in")
FLAGS = ("gradients", "torn")


class Script:
    """Plays one scenario file against a new core."""

    def __init__(self) -> None:
        self._core = Core()
        self._now = 0.0
        self._opening: RunOpened
        self._sets: tuple[tuple[str, ...], ...] = ()

    def play(self, text: str) -> str:
        """The same scenario with the answers that the core gives now."""
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith(" "):
                continue
            lines.append(line)
            if line.strip() and not line.startswith("#"):
                lines += [f"    {answer}" for answer in self._answer(line)]
        return "\n".join(lines) + "\n"

    def _answer(self, line: str) -> list[str]:
        phase = phase_in_words(self._core.state.phase)
        commands: list[Command] = []
        for event in self._events(line.split()):
            commands += self._core.step(self._now, event)
        self._sets = next((c.sets for c in commands if isinstance(c, StartSnapshots)), self._sets)
        new_phase = phase_in_words(self._core.state.phase)
        return [*_describe_commands(commands), *([f"= {new_phase}"] if new_phase != phase else [])]

    def _events(self, words: list[str]) -> Iterator[Event]:
        """The events of one line: one flat case for each keyword."""
        kind, *rest = words
        match kind:
            case "run":
                self._opening = _opening_of(dict(word.split("=", 1) for word in rest))
            case "wake":
                deadline = self._core.next_deadline()
                assert deadline is not None, "the core has no deadline"
                self._now = max(self._now, deadline)
                yield Woke()
            case "restarted":
                stopped_at, self._now = self._now, self._now + float(rest[1])
                yield ControllerRestarted(self._core.state.incarnation + 1, stopped_at)
                yield Woke()
            case "open":
                yield _with_saved(self._opening, rest)
            case "store":
                yield StoreReady("host", 29500) if rest == ["ready"] else StoreLost("it died")
            case "snapshot_server":
                yield self._snapshot_server_event(rest[0], rest[1], rest[2:])
            case "node_draining":
                in_s = float(_keywords(rest).get("in", 30.0))
                yield NodeDraining(rest[0], self._now + in_s, "a notice")
            case "node_at_risk":
                yield NodeAtRisk(rest[0], "a notice")
            case "reshard":
                yield LayoutRequested("request", TargetLayout.parse(rest[0]))
            case "stop":
                yield StopRequested("SIGTERM")
            case "steps":
                yield from self._steps(rest)
            case "audited":
                yield self._audited(rest)
            case "checkpointed" | "damaged":
                yield from self._checkpoint_events(rest)
            case _:
                yield from self._worker_events(kind, rest)

    def _checkpoint_events(self, words: list[str]) -> Iterator[Event]:
        """The checkpoint is published; or, if the line names workers, these found it damaged."""
        step, generation = int(words[-2 if words[-1][0] == "g" else -1]), self._generation(words)
        path = f"step-{step}-g{generation}"
        names = [word for word in words if word[0] == "w"]
        if not names:
            yield Checkpointed(step, generation, path)
        for name in names:
            yield CheckpointDamaged(name, self._core.state.generation, path, "a flipped bit")

    def _snapshot_server_event(self, kind: str, node: str, words: list[str]) -> Event:
        match kind:
            case "ready":
                server = SnapshotServer(node, "", f"server-{node}", "host", 29501)
                return SnapshotServerReady(server)
            case "lost":
                return SnapshotServerLost(node, "it died")
            case "reported":
                return self._reported(node, words)
            case _:
                raise ValueError(f"unknown event of a snapshot server {kind!r}: see script.py")

    def _reported(self, node: str, words: list[str]) -> SnapshotServerReported:
        names = [word for word in words if word[0] == "w" and word[1:].isdigit()]
        steps = _range(_keywords(words)["at"]) if names else range(0)
        generation = self._generation(words)
        slots = tuple(Slot(name, generation, step) for name in names for step in steps)
        parities = tuple(
            ParitySlot(members, names[0], generation, step)
            for members in self._sets
            if names and names[0] in members
            for step in steps
        )
        reported_generation = self._core.state.generation
        return SnapshotServerReported(node, reported_generation, slots, parities=parities)

    def _audited(self, words: list[str]) -> Audited:
        groups = tuple(tuple(group.split()) for group in " ".join(words[1:]).split(" | ") if group)
        return Audited(self._core.state.generation, int(words[0]), 2, (groups,) if groups else ())

    def _worker_events(self, kind: str, words: list[str]) -> Iterator[Event]:
        """One event for each worker that the line names."""
        names = [word for word in words if word[0] == "w" and word[1:].isdigit()]
        cause = " ".join(words[len(names) :])
        options = _keywords(words)
        generation = self._generation(words)
        step = _last(options.get("at", options.get("step", "0")))
        for name in names:
            match kind:
                case "ready":
                    memory_bytes = int(options["with"]) if "with" in options else None
                    node = options.get("on", f"node-{name}")
                    yield WorkerReady(name, node, 1, memory_bytes=memory_bytes)
                case "lost":
                    yield WorkerLost(name, cause or "killed")
                case "suspected":
                    yield WorkerSuspected(name, "no answer to a probe")
                case "draining":
                    yield WorkerDraining(name, "requested")
                case "formed":
                    yield GroupFormed(name, generation)
                case "moved":
                    yield StateReady(name, generation, 0, 0, 0.0, 1, 1, 2)
                case "paused":
                    yield Paused(name, generation, step)
                case "quiesced" | "rolled_forward" | "sent":
                    yield self._unwinding(kind, name, step, words)
                case "raised":
                    yield WorkerRaised(name, generation, cause, f"{cause} trouble", "traceback")
                case "written":
                    yield PartWritten(name, generation, step, PartFile(f"part-{name}", 100, 1))
                case "failed":
                    yield PartFailed(name, generation, step, "no space left")
                case _:
                    raise ValueError(f"unknown event {kind!r}: see the list in script.py")

    def _steps(self, words: list[str]) -> Iterator[Event]:
        generation = self._generation(words)
        for step in _range(words[0]):
            self._now += 0.5
            skipped, options = "skipped" in words, _keywords(words)
            loss = None if skipped else float(options.get("loss", "2"))
            record = replace(self._record(step), loss=loss, skipped=skipped)
            vote = replace(
                _vote(step),
                num_snapshots=record.world_size * ("whole" in words),
                num_save_requests=record.world_size * ("save_requested" in words),
                num_writing=record.world_size * ("writing" in words),
            )
            yield StepCommitted(generation, record, vote)

    def _unwinding(
        self, kind: str, name: str, step: int, words: list[str]
    ) -> Quiesced | RolledForward | RecordsSent:
        options, generation = _keywords(words), self._generation(words)
        if kind == "rolled_forward":
            return RolledForward(name, generation, self._record(step))
        records = (
            tuple(self._record(s) for s in _range(options["records"]))
            if "records" in options
            else ()
        )
        vote = _vote(int(options["saw"])) if "saw" in options else _vote(step) if step else None
        if kind == "sent":
            return RecordsSent(name, generation, records, vote)
        complete = "gradients" in words
        torn = "torn" in words
        return Quiesced(name, generation, step, vote, complete, torn, records, saving_step=step)

    def _record(self, step: int) -> StepRecord:
        state = self._core.state
        world_size = len(state.live.members())
        return StepRecord(
            self._now, step, state.generation, world_size, 2.0, 64, 0.1, 1.0, 0.5, skipped=False
        )

    def _generation(self, words: list[str]) -> int:
        generations = [int(word[1:]) for word in words if word[0] == "g" and word[1:].isdigit()]
        return generations[0] if generations else self._core.state.generation


def _opening_of(options: dict[str, str]) -> RunOpened:
    min_workers, _, max_workers = options["workers"].partition(":")
    job = Job(
        num_microbatches=int(options.get("microbatches", 8)),
        state_bytes=int(options.get("state_bytes", 0)),
        steps=int(options["steps"]),
        checkpoint_every=int(options.get("checkpoint_every", 0)),
    )
    target_layout = TargetLayout.parse(options.get("layout", ""), int(max_workers))
    snapshot_every = int(options.get("snapshot_every", 0))
    policy = quiet_policy(
        int(min_workers),
        int(max_workers),
        snapshot_every=snapshot_every,
        snapshot_redundancy=options.get("snapshot_redundancy", "copy"),
        max_skipped=int(options.get("max_skipped", 0)),
        spike_factor=float(options.get("spike_factor", 0)),
        spike_window=int(options.get("spike_window", 4)),
        audit_every=int(options.get("audit_every", 0)),
        audit_rollback="audit_rollback" in options,
    )
    return RunOpened(1, policy, target_layout, job)


def _with_saved(opening: RunOpened, words: list[str]) -> RunOpened:
    if not words:
        return opening
    pairs = zip(words[1::2], words[2::2], strict=True)
    saved = tuple(Saved(int(s), int(g[1:]), f"step-{s}-{g}") for s, g in pairs)
    return RunOpened(2, opening.policy, opening.target_layout, opening.job, saved)


def _vote(step: int) -> Vote:
    return Vote(step, 128.0, 64, 4.0, 2)


def _keywords(words: list[str]) -> dict[str, str]:
    """Each keyword with the word that follows it."""
    return {word: words[i + 1] for i, word in enumerate(words[:-1]) if word in KEYWORDS}


def _range(text: str) -> range:
    first, _, last = text.partition("..")
    return range(int(first), int(last or first) + 1)


def _last(text: str) -> int:
    return _range(text)[-1]


def _describe_commands(commands: list[Command]) -> Iterator[str]:
    """One line for each command; consecutive steps share one line."""
    for is_record, grouped in groupby(commands, key=lambda c: isinstance(c, RecordStep)):
        group = list(grouped)
        if is_record and len(group) > 1:
            first, last = group[0], group[-1]
            assert isinstance(first, RecordStep) and isinstance(last, RecordStep)
            yield f"RecordStep {first.record.step}..{last.record.step}"
        else:
            yield from map(command_in_words, group)
