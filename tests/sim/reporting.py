"""Events, commands and phases in a few words, for traces and golden files."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.protocol.commands import (
    Abort,
    Command,
    DropCheckpoints,
    ForgetSnapshots,
    Form,
    Pause,
    PublishCheckpoint,
    QuerySnapshotServers,
    RecordStep,
    RequestCheckpoint,
    Reshard,
    Resume,
    RollForward,
    SaveCheckpoint,
    SendRecords,
    SetAside,
    StartSnapshots,
    StartSnapshotServer,
    StartStore,
    StartWorkers,
    Stopped,
    StopSnapshotServer,
    StopWorker,
)
from elastic.protocol.events import (
    Event,
    Quiesced,
    RolledForward,
    RunOpened,
    StateReady,
    StepCommitted,
)
from elastic.protocol.notes import (
    LayoutAnswered,
    MarketChosen,
    NodeQuarantined,
    NodeReleased,
    Note,
    Replaced,
    Resharded,
    RolledBack,
    StepTimeCompared,
    Waited,
    Warned,
)
from elastic.protocol.phases import Aborting, Phase, Waiting
from elastic.protocol.step_records import RecordsSent
from elastic.reshard.reshard_plan import CarriedPart


def command_in_words(command: Command) -> str:
    """The class name, then the fields that matter."""
    return f"{type(command).__name__} {_of_command(command)}".strip()


def _of_command(command: Command) -> str:  # noqa: C901 (one flat case a command)
    match command:
        case StartStore():
            return ""
        case StartWorkers():
            places = (*(f"not on {node}" for node in command.quarantined), command.market)
            return " ".join((*command.workers, *filter(None, places)))
        case StartSnapshotServer():
            return command.node
        case StartSnapshots():
            return _of_start_snapshots(command)
        case QuerySnapshotServers() | ForgetSnapshots():
            return _of_snapshot_servers(command)
        case StopSnapshotServer():
            return f"{command.node}: {command.cause}"
        case StopWorker():
            return f"{command.worker}: {command.cause}"
        case Abort() | Pause():
            return f"g{command.generation} {_names(command.workers)}: {command.cause}"
        case RollForward() | SendRecords():
            return _of_survivors(command)
        case Form():
            return _of_form(command)
        case Reshard():
            source = f"{command.source} {command.path}".strip()
            return f"g{command.generation} {_names(command.workers)} from {source}"
        case Resume():
            released = f", released {_names(command.released)}" if command.released else ""
            where = f"{command.layout} {_names(command.workers)}"
            what = f"{where}{released}{_without(command)}"
            return f"g{command.generation} from step {command.step}: {what}"
        case (
            RequestCheckpoint()
            | SaveCheckpoint()
            | PublishCheckpoint()
            | DropCheckpoints()
            | SetAside()
        ):
            return _of_saving(command)
        case RecordStep():
            return f"{command.record.step}{' missing' * command.record.missing}"
        case _ if isinstance(command, Note):
            return _of_note(command)
        case Stopped():
            reason = f": {command.reason}" if command.reason else ""
            return f"{command.outcome} at step {command.step}{reason}"


def _of_note(command: Note) -> str:
    match command:
        case Resharded():
            return f"g{command.generation} at step {command.step} from {command.source}"
        case RolledBack():
            steps = f"step {command.step} from step {command.from_step}"
            cause = f": {command.cause}" if command.cause else ""
            return f"g{command.generation} to {steps}, {command.source}{_without(command)}{cause}"
        case Warned():
            return f"{command.kind}: {command.text}"
        case Replaced() | NodeQuarantined() | NodeReleased() | StepTimeCompared():
            return _of_watching(command)
        case MarketChosen():
            withdrawn = f" instead of {_names(command.withdrawn)}" if command.withdrawn else ""
            return f"{command.num_workers} {command.market}{withdrawn}: {command.cause}"
        case Waited():
            return command.reason
        case LayoutAnswered():
            layouts = f"{command.present or 'nothing'} -> {command.planned}"
            refused = f"g{command.generation} refused: {command.refusal}"
            return refused if command.refusal else layouts


def _without(command: Resume | RolledBack) -> str:
    skipped = command.skipped_batches
    return f", without batches {_numbers(skipped)}" if skipped else ""


def _of_survivors(command: RollForward | SendRecords) -> str:
    receivers = f"g{command.generation} {_names(command.workers)}"
    if isinstance(command, SendRecords):
        return f"{receivers} after step {command.committed_step}"
    return f"{receivers} at step {command.vote.step}"


def _of_watching(command: Replaced | NodeQuarantined | NodeReleased | StepTimeCompared) -> str:
    if isinstance(command, StepTimeCompared):
        return f"{command.layout} {command.measured_s:.4g} s, not {command.predicted_s:.4g} s"
    name = command.worker if isinstance(command, Replaced) else command.node
    return f"{name}: {command.cause}"


def _of_saving(
    command: RequestCheckpoint | SaveCheckpoint | PublishCheckpoint | DropCheckpoints | SetAside,
) -> str:
    match command:
        case RequestCheckpoint():
            return f"g{command.generation} {_names(command.workers)} after step {command.step}"
        case DropCheckpoints():
            return _names(f"{step}-g{generation}" for step, generation in command.dropped)
        case SetAside():
            return f"{command.step}-g{command.generation}"
        case SaveCheckpoint():
            parts = f"parts of g{command.held_generation} as g{command.generation}"
            return f"step {command.step} {_names(command.workers)}, {parts}"
        case PublishCheckpoint():
            files = _names(file.name for file in command.files)
            return f"step {command.step} g{command.generation} {files}"


def _of_snapshot_servers(command: QuerySnapshotServers | ForgetSnapshots) -> str:
    text = f"g{command.generation} {_names(command.nodes)}"
    if isinstance(command, ForgetSnapshots) and command.kept_generation:
        return f"{text}, not g{command.kept_generation}"
    return text


def _of_start_snapshots(command: StartSnapshots) -> str:
    pairs = zip(command.workers, command.snapshot_servers, strict=True)
    placed = [
        f"{worker}@{'+'.join(k.node for k in snapshot_servers)}"
        for worker, snapshot_servers in pairs
    ]
    sets = "".join(f", parity of {_names(workers)}" for workers in command.sets)
    reason = f": {command.reason}" if command.reason else ""
    return f"g{command.generation} {_names(placed)}{sets}{reason}"


def _of_form(form: Form) -> str:
    assignment, plan = form.assignment, form.plan
    standbys = f", standbys {_names(assignment.standbys)}" if assignment.standbys else ""
    old = f", g{plan.old.generation} held by {_names(plan.holders)}" if plan.old else ""
    where = f"{assignment.layout} {_names(assignment.members)}"
    carried = [f"{p.member}@{_where(p)}->{p.carrier}" for p in plan.carried]
    snapshots = f", snapshots {_names(carried)}" if carried else ""
    return f"g{form.generation} for step {plan.step}: {where}{standbys}{old}{snapshots}"


def _where(part: CarriedPart) -> str:
    """The snapshot server that holds a part, or the nodes from which it is rebuilt."""
    return f"({'^'.join(part.nodes)})" if part.others else part.snapshot_server


def event_in_words(event: Event) -> str:
    """The class name, then its fields, shortened if there are many."""
    match event:
        case RunOpened():
            return f"RunOpened incarnation {event.incarnation}, saved {event.saved}"
        case StateReady():
            return f"StateReady {event.worker} g{event.generation}"
        case StepCommitted():
            return f"StepCommitted {event.record.step} g{event.generation}"
        case RolledForward():
            return f"RolledForward {event.worker} g{event.generation} at step {event.record.step}"
        case RecordsSent():
            steps = [record.step for record in event.records]
            sent = f"{steps[0]}..{steps[-1]}" if steps else "none"
            return f"RecordsSent {event.worker} g{event.generation} {sent}"
        case Quiesced():
            seen = f", saw the vote of {event.vote.step}" if event.vote else ""
            complete = ", gradients complete" if event.gradients_complete else ""
            torn = ", torn" if event.torn else ""
            where = f"{event.worker} g{event.generation} at step {event.committed_step}"
            return f"Quiesced {where}{seen}{complete}{torn}"
    return str(event)


def phase_in_words(phase: Phase) -> str:
    """The class name, and the workers that it waits for."""
    pending = sorted(getattr(phase, "pending", ()))
    waits_for = f" for {_names(pending)}" if pending else ""
    is_rolling_forward = isinstance(phase, Aborting) and phase.rolling_forward
    purpose = " to roll forward" if is_rolling_forward else ""
    reason = f": {phase.reason}" if isinstance(phase, Waiting) else ""
    return f"{type(phase).__name__}{waits_for}{purpose}{reason}"


def _numbers(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def _names(names: Iterable[str]) -> str:
    return f"[{' '.join(names)}]"
