"""Damaged files of a run: it resumes, or one line has the reason and the fix."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from memory_storage import MemoryStorage
from rich.console import Console

from actors.controller.journal import open_journal, replay, replay_of
from actors.controller.journal_repair import examine_journal, repair_journal
from actors.local.in_process import InProcessOutcome, run_in_process
from actors.storage.errors import RunRefused
from actors.storage.lease import claim
from actors.storage.line_logs import LineLog
from actors.storage.segments import segment_name
from actors.storage.storage import DiskStorage
from elastic.protocol.wire import FORMAT, encode
from pipelines.cli import main
from pipelines.doctor import check_run
from pipelines.errors import UserError
from pipelines.observe.history.run_folder import RunFolder
from pipelines.run.in_process import without_deadlines
from pipelines.run.plan import TrainRequest, make_plan, store_recipe

SETTINGS = ("data.seq_len=16", "checkpoint.every=4", "batch=6")
STEPS, MORE_STEPS = 10, 12


def train(storage: Path, steps: int) -> InProcessOutcome:
    request = TrainRequest("tiny", "run", str(storage), "1", None, steps, None, "random", SETTINGS)
    plan = make_plan(request, num_gpus=0)
    store_recipe(plan)
    return run_in_process(without_deadlines(plan.run))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ten steps in two sessions, with checkpoints of steps 4, 8 and 10."""
    storage = tmp_path_factory.mktemp("trained")
    for steps in (6, STEPS):
        assert train(storage, steps).outcome.outcome == "completed"
    return storage


def insert_in_the_middle(file: Path, garbage: bytes) -> None:
    """Insert a line in the middle of a file."""
    lines = file.read_bytes().splitlines(keepends=True)
    half = len(lines) // 2
    file.write_bytes(b"".join([*lines[:half], garbage + b"\n", *lines[half:]]))


def insert_before_the_last_line(file: Path, garbage: bytes) -> None:
    """Insert a line before the last one of a journal, after its newest full state."""
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:-1], garbage + b"\n", lines[-1]]))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def manifest_of(run: Path, step: int) -> Path:
    [file] = run.glob(f"checkpoints/step-{step:08d}-g*/manifest.json")
    return file


def edit_manifest(run: Path) -> None:
    file = manifest_of(run, STEPS)
    file.write_text(json.dumps({**json.loads(file.read_text()), "step": 400}))


def damage_all_manifests(run: Path) -> None:
    for file in run.glob("checkpoints/*/manifest.json"):
        file.write_text("{")


def lease_of(run: Path) -> Path:
    [file] = (run / "lease").iterdir()
    return file


def write_old_garbage_lease(run: Path) -> None:
    lease_of(run).write_bytes(b"\0" * 80)
    os.utime(lease_of(run), (time.time() - 60.0,) * 2)


def insert_incomplete_event(run: Path) -> None:
    line = {"time": 1.0, "event": "WorkerLost", "generation": 1, "format": format_of(run)}
    insert_before_the_last_line(run / "journal.jsonl", json.dumps(line).encode())


def remove_lease_of_a_new_session(run: Path) -> None:
    """A run that has only opened the journal."""
    shutil.rmtree(run / "lease")
    with open(run / JOURNAL, "a") as file:
        file.write(json.dumps({"time": 1.0, "format": format_of(run), "epoch": 99}) + "\n")


def format_of(run: Path) -> int:
    return json.loads((run / "journal.jsonl").read_text().splitlines()[0])["format"]


@dataclass(frozen=True)
class Case:
    """The damage to the run's folder, and the text of the refusal if it needs a repair."""

    damage: Callable[[Path], object]
    refusal: str = ""
    resumes_from: int = STEPS


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes(content)


def insert(name: str, garbage: bytes) -> Callable[[Path], object]:
    return lambda run: insert_in_the_middle(run / name, garbage)


def insert_late(garbage: bytes) -> Callable[[Path], object]:
    return lambda run: insert_before_the_last_line(run / JOURNAL, garbage)


JOURNAL, METRICS, RECIPE = "journal.jsonl", "metrics.jsonl", "recipe.json"
CASES = {
    "a garbage lease that is old": Case(write_old_garbage_lease),
    "no lease": Case(lambda run: shutil.rmtree(run / "lease"), "files of lease/ were removed"),
    "no lease of a session that died at once": Case(
        remove_lease_of_a_new_session, "files of lease/ were removed"
    ),
    "a garbage journal line": Case(insert_late(b"\xff\x00{"), "is no JSON object"),
    "an empty journal line": Case(insert_late(b""), "is no JSON object"),
    "a journal line of nothing": Case(insert_late(b"{}"), "cannot be replayed"),
    "a journal line of half an event": Case(insert_incomplete_event, "cannot be replayed"),
    "a garbage journal line before the newest full state": Case(
        lambda run: (run / JOURNAL).write_bytes(b"garbage\n" + (run / JOURNAL).read_bytes())
    ),
    "a journal of zeros": Case(write(JOURNAL, b"\0" * 4096)),
    "a journal of another kind": Case(write(JOURNAL, b"hello\n" * 9), "is no JSON object"),
    "a cut journal": Case(lambda run: truncate(run / JOURNAL)),
    "an empty journal": Case(write(JOURNAL, b"")),
    "no journal": Case(lambda run: (run / JOURNAL).unlink()),
    "a garbage metrics line": Case(insert(METRICS, b"\xff\x00{")),
    "a metrics line of nothing": Case(insert(METRICS, b"{}")),
    "a metrics line of a wrong type": Case(insert(METRICS, b'{"step": "x", "generation": []}')),
    "empty metrics": Case(write(METRICS, b"")),
    "no metrics": Case(lambda run: (run / METRICS).unlink()),
    "a garbage recipe": Case(write(RECIPE, b"{garbage"), "recipe.json is damaged"),
    "an empty recipe": Case(write(RECIPE, b""), "recipe.json is damaged"),
    "a cut recipe": Case(lambda run: truncate(run / RECIPE), "recipe.json is damaged"),
    "a recipe of a wrong type": Case(write(RECIPE, b"[]"), "recipe.json is damaged"),
    "a recipe of something else": Case(write(RECIPE, b'{"a": 1}'), "recipe.json is damaged"),
    "a manifest edited to another step": Case(edit_manifest, resumes_from=8),
    "an empty manifest": Case(lambda run: manifest_of(run, STEPS).write_text(""), resumes_from=8),
    "a cut manifest": Case(lambda run: truncate(manifest_of(run, STEPS)), resumes_from=8),
    "a manifest of a wrong type": Case(
        lambda run: manifest_of(run, STEPS).write_text('{"format_version": 2, "files": [1]}'),
        resumes_from=8,
    ),
    "no whole manifest": Case(damage_all_manifests, resumes_from=0),
}


@pytest.mark.parametrize("name", CASES)
def test_damaged_run_resumes_or_is_repaired(
    name: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, storage = CASES[name], tmp_path / "runs"
    shutil.copytree(trained, storage)
    run = storage / "run"
    case.damage(run)
    assert status_code(storage, capsys) in (0, 2)
    if case.refusal:
        with pytest.raises((UserError, RunRefused)) as refused:
            train(storage, MORE_STEPS)
        line = str(refused.value)
        assert "\n" not in line and case.refusal in line
        assert f"`elastic doctor run --storage {storage} --repair`" in line
        before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
        assert check_run("run", str(storage), False, Console(quiet=True)) == 1
        after = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
        assert after == before, "an examination changes no file"
        assert check_run("run", str(storage), True, Console(quiet=True)) == 0
        assert is_content_preserved(run, before)
        assert check_run("run", str(storage), False, Console(quiet=True)) == 0
    ended = train(storage, MORE_STEPS)
    assert (ended.outcome.outcome, ended.outcome.step) == ("completed", MORE_STEPS)
    resume_steps = [
        row["step"] for row in RunFolder.of(storage, "run").journal.rows() if is_resume(row)
    ]
    assert resume_steps[-1] == case.resumes_from
    generations = [row["generation"] for row in read_rows(run / METRICS) if "loss" in row]
    assert generations == sorted(generations)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if "journal" in n])
def test_damaged_journal_is_repaired_on_an_object_store_as_on_a_disk(
    name: str, trained: Path, tmp_path: Path
) -> None:
    """The old segments stay; those of the epoch of the repair begin at the damage. A late segment
    of the previous process does not count."""
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run)
    CASES[name].damage(run)
    on_disk = LineLog(DiskStorage(run), JOURNAL)
    content = (run / JOURNAL).read_bytes() if on_disk.exists() else b""
    memory: Any = MemoryStorage()
    for epoch, begin, lines in split_in_segments(content):
        memory.write(segment_name(JOURNAL, epoch, begin), lines)
    log, before = LineLog(memory, JOURNAL), dict(memory.objects)
    damage, damage_on_disk = examine_journal(log), examine_journal(on_disk)
    if damage is None or damage_on_disk is None:
        assert damage == damage_on_disk
        return
    assert (damage.offset, damage.num_lost_lines) == (
        damage_on_disk.offset,
        damage_on_disk.num_lost_lines,
    )
    lease = claim(memory, newer_than=NUM_PIECES)
    repair_journal(log, damage, lease)
    repair_journal(on_disk, damage_on_disk, claim(on_disk.storage, newer_than=NUM_PIECES))
    assert {n: memory.objects.get(n) for n in before} == before, "nothing is deleted"
    assert examine_journal(log) is None
    state, state_on_disk = (replay(journal).core.state for journal in (log, on_disk))
    assert encode(state) == encode(replace(state_on_disk, incarnation=state.incarnation))
    late_segment = segment_name(JOURNAL, NUM_PIECES, len(content))
    memory.write(late_segment, b'{"time": 1.0}\n')
    lease.release()
    new_lease = claim(memory)
    writer = open_journal(log, new_lease)
    assert encode(replay_of(new_lease, log).core.state) == encode(state)
    writer.write({"time": 2e9, "warning": "the run continues", "format": FORMAT})
    assert writer.close() == ""
    assert list(log.lines())[-1]["warning"] == "the run continues"


NUM_PIECES = 3


def split_in_segments(content: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Segments as three controllers would have written them: epoch, first byte and lines."""
    lines, begin = content.splitlines(keepends=True), 0
    size = len(lines) // NUM_PIECES + 1
    for number in range(NUM_PIECES):
        piece = b"".join(lines[number * size : (number + 1) * size])
        if piece:
            yield number + 1, begin, piece
        begin += len(piece)


def is_resume(row: dict[str, object]) -> bool:
    return row.get("command") == "Resume"


def read_rows(file: Path) -> list[dict[str, object]]:
    parsed = []
    for line in file.read_bytes().splitlines():
        try:
            parsed.append(json.loads(line))
        except ValueError:
            continue
    return parsed


def is_content_preserved(run: Path, before: dict[Path, bytes]) -> bool:
    """The content of a damaged file still exists, in one piece or two."""
    contents = [file.read_bytes() for file in run.rglob("*") if file.is_file()]
    for file, content in before.items():
        is_unchanged = content in contents or (file.exists() and content in file.read_bytes())
        if is_unchanged or file.parent.name == "lease":
            continue
        remainder = file.read_bytes()
        size = next((i for i in range(len(content) + 1) if content[i:] in contents), None)
        assert size is not None and remainder[:size] == content[:size], file
    return True


def status_code(storage: Path, capsys: pytest.CaptureFixture[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["elastic", "status", "run", "--storage", str(storage)])
        with pytest.raises(SystemExit) as ended:
            main()
    assert len(capsys.readouterr().err.splitlines()) <= 1
    return int(ended.value.code or 0)


def test_new_garbage_lease_is_refused_until_it_is_stale(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = tmp_path / "runs"
    shutil.copytree(trained, storage)
    lease_of(storage / "run").write_bytes(b"\0" * 80)
    with pytest.raises(RunRefused, match="try again in 15 s"):
        train(storage, MORE_STEPS)
    assert status_code(storage, capsys) == 0
    assert check_run("run", str(storage), False, Console(quiet=True)) == 0
    with pytest.raises(UserError, match="try again in 15 s"):
        check_run("run", str(storage), True, Console(quiet=True))


def test_command_line_refuses_a_damaged_run_in_one_line(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    storage = tmp_path / "runs"
    shutil.copytree(trained, storage)
    insert_before_the_last_line(storage / "run" / JOURNAL, b"garbage")
    common = ["--data", "random", "--storage", str(storage), "--in-process", "--steps", "12"]
    settings = [word for change in SETTINGS for word in ("--set", change)]
    train_line = ["train", "tiny", "--run-name", "run", *common, *settings]
    for arguments, message in (
        (train_line, "is no JSON object"),
        (["doctor", "--repair"], "needs the name of a run"),
        (["doctor", "other", "--storage", str(storage)], "there is no run"),
    ):
        monkeypatch.setattr(sys, "argv", ["elastic", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        assert ended.value.code == 2, output
        [line] = output.err.splitlines()
        assert message in line
