"""The files of a run: which are damaged, and their repair. Nothing is deleted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from actors.controller.journal import replay
from actors.controller.journal_repair import ASIDE, Damage, examine_journal, repair_journal
from actors.controller.run_opening import repair_command
from actors.storage.checkpoint_files import FoundCheckpoints, find_checkpoints, set_aside
from actors.storage.errors import RunTaken
from actors.storage.lease import Lease, claim, damaged_leases
from actors.storage.line_epochs import newest_epoch
from actors.storage.line_logs import LineLog, parse_line
from actors.storage.storage import DiskStorage
from elastic.protocol.wire import UnreadableJournal
from pipelines.doctor.finding import Finding
from pipelines.observe.history.formatting import counted
from pipelines.observe.history.run_folder import RECIPE, TRACKING, RunFolder
from pipelines.observe.tracking.delivered import Delivered
from pipelines.settings import TrainSettings
from pipelines.settings.errors import UserError

LOST = {
    RECIPE: "the settings of the run: give the recipe, --data and --set as before, since nothing "
    "compares them any more",
    TRACKING: "how much of the run MLflow has: the run is delivered again, to a new MLflow run",
}


@dataclass(frozen=True)
class _Seen:
    """What is wrong with a run's files."""

    small_files: tuple[str, ...]
    damage: Damage | None
    leases: tuple[str, ...]
    newest_epoch: int
    """Of the journal and of segments: the lease has to be newer."""
    is_lease_lost: bool
    checkpoints: FoundCheckpoints

    @property
    def is_sound(self) -> bool:
        is_damaged = self.small_files or self.damage or self.leases or self.is_lease_lost
        return not (is_damaged or self.checkpoints.complaints)


def check_files(run: RunFolder) -> Iterator[Finding]:
    """One finding a kind of file. Raises `UserError` if it is no run, and `OSError`."""
    seen, repair = _look(run), repair_command(run.files)
    for name in (RECIPE, TRACKING):
        if name in seen.small_files:
            yield Finding(name, f"damaged; with it is lost {LOST[name]}", "failed", repair)
        elif run.files.size(name) is not None:
            yield Finding(name, "can be read")
    if seen.damage:
        told = f"{seen.damage.cause}; lost with it: {seen.damage.lost}"
        yield Finding("journal", told, "failed", repair)
    else:
        yield Finding("journal", "can be replayed")
    if seen.is_lease_lost:
        yield Finding("lease", "its files were removed", "failed", repair)
    elif seen.leases:
        told = f"{', '.join(seen.leases)} cannot be read"
        mend = "a run that nobody drives can be resumed 15 s after that was written"
        yield Finding("lease", told, "warning", mend)
    for log in (run.metrics, run.system, run.statistics):
        yield from _log(log)
    for complaint in seen.checkpoints.complaints:
        yield Finding("checkpoint", complaint, "warning", repair)
    yield _continues(seen.checkpoints)


def repair_run(run: RunFolder) -> Iterator[Finding]:
    """Set aside what is damaged; one finding for each repair. Raises as `check_files` does, and
    `UserError` if somebody drives the run."""
    seen = _look(run)
    if seen.is_sound:
        yield Finding("files", "nothing is damaged")
        yield _continues(seen.checkpoints)
        return
    try:
        lease = claim(run.files, newer_than=seen.newest_epoch)
    except RunTaken as error:
        raise UserError(str(error)) from None
    try:
        yield from _repair(run, seen, lease)
    finally:
        lease.release()
    yield _continues(find_checkpoints(run.files))


def _repair(run: RunFolder, seen: _Seen, lease: Lease) -> Iterator[Finding]:
    for name in seen.small_files:
        aside = f"{ASIDE}/{name}.epoch-{lease.epoch}"
        run.files.write(aside, run.files.read(name))
        run.files.remove(name)
        told = f"set aside as {run.files.at(aside).url}; lost is {LOST[name]}"
        yield Finding(name, told, "warning")
    if seen.damage:
        aside = repair_journal(run.journal, seen.damage, lease)
        told = f"{seen.damage.cause}; {seen.damage.lost} are set aside as {aside}"
        yield Finding("journal", told, "warning")
    if seen.leases or seen.is_lease_lost:
        yield Finding("lease", f"renewed as epoch {lease.epoch}", "warning")
    for folder, complaint in zip(
        seen.checkpoints.damaged, seen.checkpoints.complaints, strict=True
    ):
        set_aside(run.files.at(folder))
        yield Finding("checkpoint", f"{complaint}; its manifest is set aside", "warning")


def _look(run: RunFolder) -> _Seen:
    if not run.journal.exists() and run.files.size(RECIPE) is None:
        raise UserError(f"{run.url}: there is no run; name another, or another --storage")
    try:
        damage = examine_journal(run.journal)
        state = (damage.whole if damage else replay(run.journal)).core.state
    except UnreadableJournal as error:
        raise UserError(f"{run.journal.url}: {error}") from None
    epochs = [state.incarnation]
    if isinstance(run.files, DiskStorage):
        epochs.append(newest_epoch(line for _, line in run.journal.lines_from_end()))
    else:
        for log in (run.journal, run.metrics, run.system):
            epochs += [segment.epoch for segment in log.all_segments()]
    names = [name.rpartition("/")[2] for name in run.files.files("lease")]
    leased = [int(n.partition("-")[0]) for n in names if n.partition("-")[0].isdecimal()]
    return _Seen(
        tuple(_damaged_small_files(run)),
        damage,
        tuple(damaged_leases(run.files)),
        max(epochs),
        max(leased, default=0) < max(epochs),
        find_checkpoints(run.files),
    )


def _damaged_small_files(run: RunFolder) -> Iterator[str]:
    try:
        recipe = run.recipe()
        if recipe is not None:
            TrainSettings.model_validate(recipe["settings"])
    except (UserError, KeyError, ValidationError):
        yield RECIPE
    try:
        Delivered.load(run.files, "", "")
    except UserError:
        yield TRACKING


def _log(log: LineLog) -> Iterator[Finding]:
    """Readers leave out what cannot be read, so there is nothing to repair."""
    if not log.exists():
        return
    reader, num_lines, num_lost = log.reader(), 0, 0
    for block in reader.blocks():
        lines = block.split(b"\n")[:-1]
        num_lines += len(lines)
        num_lost += sum(parse_line(line) is None for line in lines)
    if not num_lost and not reader.num_lost_bytes:
        yield Finding(log.name, counted(num_lines, "line"))
        return
    told = f"{num_lost:,} of {counted(num_lines, 'line')} cannot be read"
    told += f", {reader.num_lost_bytes:,} bytes are missing" if reader.num_lost_bytes else ""
    yield Finding(log.name, told, "warning", "nothing has to be done: readers leave them out")


def _continues(found: FoundCheckpoints) -> Finding:
    if not found.whole:
        return Finding("resume", "no whole checkpoint: from the beginning", "warning")
    return Finding("resume", f"from the checkpoint of step {found.whole[-1].step}")
