"""Checks of a run's files, and their repair, which sets damaged files aside and deletes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from actors.controller.journal import replay
from actors.controller.journal_repair import DAMAGED_FOLDER, Damage, examine_journal, repair_journal
from actors.controller.run_opening import repair_command
from actors.storage.checkpoint_files import FoundCheckpoints, find_checkpoints, set_aside
from actors.storage.errors import RunTaken
from actors.storage.lease import Lease, claim, damaged_leases
from actors.storage.line_epochs import newest_epoch
from actors.storage.line_logs import LineLog, parse_line
from actors.storage.storage import DiskStorage
from elastic.protocol.wire import UnreadableJournal
from pipelines.doctor.finding import Finding
from pipelines.errors import UserError
from pipelines.observe.history.formatting import counted
from pipelines.observe.history.run_folder import (
    RECIPE,
    TRACKING,
    RunFolder,
    refuse_other_format,
)
from pipelines.observe.tracking.delivered import Delivered
from pipelines.settings import TrainSettings

LOST = {
    RECIPE: "the stored settings: resume with the same recipe, --data and --set, since changes "
    "are no longer detected",
    TRACKING: "the record of what MLflow has: the run is delivered again, to a new MLflow run",
}


@dataclass(frozen=True)
class _Inspection:
    """The problems of a run's files."""

    small_files: tuple[str, ...]
    damage: Damage | None
    leases: tuple[str, ...]
    newest_epoch: int
    """The newest epoch in the journal and the segments; a new lease must have a newer one."""
    is_lease_lost: bool
    checkpoints: FoundCheckpoints

    @property
    def is_sound(self) -> bool:
        is_damaged = self.small_files or self.damage or self.leases or self.is_lease_lost
        return not (is_damaged or self.checkpoints.complaints)


def check_files(run: RunFolder) -> Iterator[Finding]:
    """One finding per kind of file. Raises `UserError` if there is no run, and `OSError`."""
    inspection, repair = _inspect(run), repair_command(run.files)
    for name in (RECIPE, TRACKING):
        if name in inspection.small_files:
            yield Finding(name, f"damaged; a repair loses {LOST[name]}", "failed", repair)
        elif run.files.size(name) is not None:
            yield Finding(name, "readable")
    if inspection.damage:
        value = f"{inspection.damage.cause}; a repair loses: {inspection.damage.lost}"
        yield Finding("journal", value, "failed", repair)
    else:
        yield Finding("journal", "replayable")
    if inspection.is_lease_lost:
        yield Finding("lease", "its files were removed", "failed", repair)
    elif inspection.leases:
        value = f"{', '.join(inspection.leases)} cannot be read"
        fix = "a run without a driver can be resumed 15 s after the file was written"
        yield Finding("lease", value, "warning", fix)
    for log in (run.metrics, run.system, run.statistics):
        yield from _log(log)
    for complaint in inspection.checkpoints.complaints:
        yield Finding("checkpoint", complaint, "warning", repair)
    yield _resume_point(inspection.checkpoints)


def repair_run(run: RunFolder) -> Iterator[Finding]:
    """Set damaged files aside; one finding per repair. Raises as `check_files` does, and
    `UserError` if the run has a driver."""
    inspection = _inspect(run)
    if inspection.is_sound:
        yield Finding("files", "nothing is damaged")
        yield _resume_point(inspection.checkpoints)
        return
    try:
        lease = claim(run.files, newer_than=inspection.newest_epoch)
    except RunTaken as error:
        raise UserError(str(error)) from None
    try:
        yield from _repair(run, inspection, lease)
    finally:
        lease.release()
    yield _resume_point(find_checkpoints(run.files))


def _repair(run: RunFolder, inspection: _Inspection, lease: Lease) -> Iterator[Finding]:
    for name in inspection.small_files:
        aside = f"{DAMAGED_FOLDER}/{name}.epoch-{lease.epoch}"
        run.files.write(aside, run.files.read(name))
        run.files.remove(name)
        value = f"set aside as {run.files.at(aside).url}; lost: {LOST[name]}"
        yield Finding(name, value, "warning")
    if inspection.damage:
        aside = repair_journal(run.journal, inspection.damage, lease)
        value = f"{inspection.damage.cause}; {inspection.damage.lost} are set aside as {aside}"
        yield Finding("journal", value, "warning")
    if inspection.leases or inspection.is_lease_lost:
        yield Finding("lease", f"renewed as epoch {lease.epoch}", "warning")
    for folder, complaint in zip(
        inspection.checkpoints.damaged, inspection.checkpoints.complaints, strict=True
    ):
        set_aside(run.files.at(folder))
        yield Finding("checkpoint", f"{complaint}; its manifest is set aside", "warning")


def _inspect(run: RunFolder) -> _Inspection:
    if not run.journal.exists() and run.files.size(RECIPE) is None:
        raise UserError(f"{run.url}: there is no run; give another run name or --storage")
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
    return _Inspection(
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
    except UserError:
        recipe = {}
    if recipe is not None:
        refuse_other_format(run, recipe)
        try:
            TrainSettings.model_validate(recipe["settings"])
        except (UserError, KeyError, ValidationError):
            yield RECIPE
    try:
        Delivered.load(run.files, "", "")
    except UserError:
        yield TRACKING


def _log(log: LineLog) -> Iterator[Finding]:
    """Check the lines of a log; readers skip unreadable ones, so there is nothing to repair."""
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
    value = f"{num_lost:,} of {counted(num_lines, 'line')} cannot be read"
    value += f", {reader.num_lost_bytes:,} bytes are missing" if reader.num_lost_bytes else ""
    yield Finding(log.name, value, "warning", "nothing to do: readers skip them")


def _resume_point(checkpoints: FoundCheckpoints) -> Finding:
    if not checkpoints.whole:
        return Finding("resume", "no complete checkpoint: from the beginning", "warning")
    return Finding("resume", f"from the checkpoint of step {checkpoints.whole[-1].step}")
