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
from actors.local.in_process import Ended, run_in_process
from actors.storage.errors import RunRefused
from actors.storage.lease import claim
from actors.storage.line_logs import LineLog
from actors.storage.segments import segment_name
from actors.storage.storage import DiskStorage
from elastic.protocol.wire import FORMAT, encode
from pipelines.cli import main
from pipelines.doctor import check_run
from pipelines.observe.history.run_folder import RunFolder
from pipelines.run.in_process import without_deadlines
from pipelines.run.plan import TrainRequest, make_plan, store_recipe
from pipelines.settings.errors import UserError

SETTINGS = ("data.seq_len=16", "checkpoint.every=4", "batch=6")
STEPS, MORE_STEPS = 10, 12


def train(storage: Path, steps: int) -> Ended:
    asked = TrainRequest("tiny", "run", str(storage), "1", None, steps, None, "random", SETTINGS)
    plan = make_plan(asked, num_gpus=0)
    store_recipe(plan)
    return run_in_process(without_deadlines(plan.run))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ten steps in two sessions, with checkpoints of steps 4, 8 and 10."""
    storage = tmp_path_factory.mktemp("trained")
    for steps in (6, STEPS):
        assert train(storage, steps).outcome.outcome == "completed"
    return storage


def middle(file: Path, garbage: bytes) -> None:
    """Insert a line in the middle of a file."""
    lines = file.read_bytes().splitlines(keepends=True)
    half = len(lines) // 2
    file.write_bytes(b"".join([*lines[:half], garbage + b"\n", *lines[half:]]))


def near_the_end(file: Path, garbage: bytes) -> None:
    """Insert a line before the last one of a journal, after its newest full state."""
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:-1], garbage + b"\n", lines[-1]]))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def manifest(run: Path, step: int) -> Path:
    [file] = run.glob(f"checkpoints/step-{step:08d}-g*/manifest.json")
    return file


def edited_manifest(run: Path) -> None:
    file = manifest(run, STEPS)
    file.write_text(json.dumps({**json.loads(file.read_text()), "step": 400}))


def all_manifests(run: Path) -> None:
    for file in run.glob("checkpoints/*/manifest.json"):
        file.write_text("{")


def lease_of(run: Path) -> Path:
    [file] = (run / "lease").iterdir()
    return file


def old_garbage_lease(run: Path) -> None:
    lease_of(run).write_bytes(b"\0" * 80)
    os.utime(lease_of(run), (time.time() - 60.0,) * 2)


def half_event(run: Path) -> None:
    line = {"time": 1.0, "event": "WorkerLost", "generation": 1, "format": fmt(run)}
    near_the_end(run / "journal.jsonl", json.dumps(line).encode())


def no_lease_of_one_that_died_at_once(run: Path) -> None:
    """A run that has only opened the journal."""
    shutil.rmtree(run / "lease")
    with open(run / JOURNAL, "a") as file:
        file.write(json.dumps({"time": 1.0, "format": fmt(run), "epoch": 99}) + "\n")


def fmt(run: Path) -> int:
    return json.loads((run / "journal.jsonl").read_text().splitlines()[0])["format"]


@dataclass(frozen=True)
class Case:
    """The damage to the run's folder, and the text of the refusal if it needs a repair."""

    harm: Callable[[Path], object]
    refusal: str = ""
    resumes_from: int = STEPS


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes(content)


def put(name: str, garbage: bytes) -> Callable[[Path], object]:
    return lambda run: middle(run / name, garbage)


def put_late(garbage: bytes) -> Callable[[Path], object]:
    return lambda run: near_the_end(run / JOURNAL, garbage)


JOURNAL, METRICS, RECIPE = "journal.jsonl", "metrics.jsonl", "recipe.json"
CASES = {
    "a garbage lease that is old": Case(old_garbage_lease),
    "no lease": Case(lambda run: shutil.rmtree(run / "lease"), "files of lease/ were removed"),
    "no lease of one that died at once": Case(
        no_lease_of_one_that_died_at_once, "files of lease/ were removed"
    ),
    "a garbage journal line": Case(put_late(b"\xff\x00{"), "is no JSON object"),
    "an empty journal line": Case(put_late(b""), "is no JSON object"),
    "a journal line of nothing": Case(put_late(b"{}"), "cannot be replayed"),
    "a journal line of half an event": Case(half_event, "cannot be replayed"),
    "a garbage journal line before the newest full state": Case(
        lambda run: (run / JOURNAL).write_bytes(b"garbage\n" + (run / JOURNAL).read_bytes())
    ),
    "a journal of zeros": Case(write(JOURNAL, b"\0" * 4096)),
    "a journal of another kind": Case(write(JOURNAL, b"hello\n" * 9), "is no JSON object"),
    "a cut journal": Case(lambda run: cut(run / JOURNAL)),
    "an empty journal": Case(write(JOURNAL, b"")),
    "no journal": Case(lambda run: (run / JOURNAL).unlink()),
    "a garbage metrics line": Case(put(METRICS, b"\xff\x00{")),
    "a metrics line of nothing": Case(put(METRICS, b"{}")),
    "a metrics line of a wrong type": Case(put(METRICS, b'{"step": "x", "generation": []}')),
    "empty metrics": Case(write(METRICS, b"")),
    "no metrics": Case(lambda run: (run / METRICS).unlink()),
    "a garbage recipe": Case(write(RECIPE, b"{garbage"), "recipe.json is damaged"),
    "an empty recipe": Case(write(RECIPE, b""), "recipe.json is damaged"),
    "a cut recipe": Case(lambda run: cut(run / RECIPE), "recipe.json is damaged"),
    "a recipe of a wrong type": Case(write(RECIPE, b"[]"), "recipe.json is damaged"),
    "a recipe of something else": Case(write(RECIPE, b'{"a": 1}'), "recipe.json is damaged"),
    "a manifest edited to another step": Case(edited_manifest, resumes_from=8),
    "an empty manifest": Case(lambda run: manifest(run, STEPS).write_text(""), resumes_from=8),
    "a cut manifest": Case(lambda run: cut(manifest(run, STEPS)), resumes_from=8),
    "a manifest of a wrong type": Case(
        lambda run: manifest(run, STEPS).write_text('{"format_version": 2, "files": [1]}'),
        resumes_from=8,
    ),
    "no whole manifest": Case(all_manifests, resumes_from=0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_run_resumes_or_is_repaired(
    name: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, storage = CASES[name], tmp_path / "runs"
    shutil.copytree(trained, storage)
    run = storage / "run"
    case.harm(run)
    assert status(storage, capsys) in (0, 2)
    if case.refusal:
        with pytest.raises((UserError, RunRefused)) as refused:
            train(storage, MORE_STEPS)
        line = str(refused.value)
        assert "\n" not in line and case.refusal in line
        assert f"`elastic doctor run --storage {storage} --repair`" in line
        before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
        assert check_run("run", str(storage), False, Console(quiet=True)) == 1
        after = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
        assert after == before, "to look changes nothing"
        assert check_run("run", str(storage), True, Console(quiet=True)) == 0
        assert nothing_is_lost(run, before)
        assert check_run("run", str(storage), False, Console(quiet=True)) == 0
    ended = train(storage, MORE_STEPS)
    assert (ended.outcome.outcome, ended.outcome.step) == ("completed", MORE_STEPS)
    begun = [row["step"] for row in RunFolder.of(storage, "run").journal.rows() if resumed(row)]
    assert begun[-1] == case.resumes_from
    generations = [row["generation"] for row in rows(run / METRICS) if "loss" in row]
    assert generations == sorted(generations)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if "journal" in n])
def test_a_damaged_journal_is_repaired_on_an_object_store_as_on_a_disk(
    name: str, trained: Path, tmp_path: Path
) -> None:
    """The segments stay; those of the repair's epoch begin at the damage. What comes late from the
    process that was there before does not count."""
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run)
    CASES[name].harm(run)
    on_disk = LineLog(DiskStorage(run), JOURNAL)
    content = (run / JOURNAL).read_bytes() if on_disk.exists() else b""
    memory: Any = MemoryStorage()
    for epoch, begin, lines in pieces(content):
        memory.write(segment_name(JOURNAL, epoch, begin), lines)
    log, before = LineLog(memory, JOURNAL), dict(memory.objects)
    damage, same = examine_journal(log), examine_journal(on_disk)
    if damage is None or same is None:
        assert damage == same
        return
    assert (damage.offset, damage.num_lost_lines) == (same.offset, same.num_lost_lines)
    lease = claim(memory, newer_than=NUM_PIECES)
    repair_journal(log, damage, lease)
    repair_journal(on_disk, same, claim(on_disk.storage, newer_than=NUM_PIECES))
    assert {n: memory.objects.get(n) for n in before} == before, "nothing is deleted"
    assert examine_journal(log) is None
    state, on_the_disk = (replay(there).core.state for there in (log, on_disk))
    assert encode(state) == encode(replace(on_the_disk, incarnation=state.incarnation))
    late = segment_name(JOURNAL, NUM_PIECES, len(content))
    memory.write(late, b'{"time": 1.0}\n')
    lease.release()
    again = claim(memory)
    writer = open_journal(log, again)
    assert encode(replay_of(again, log).core.state) == encode(state)
    writer.write({"time": 2e9, "warning": "it goes on", "format": FORMAT})
    assert writer.close() == ""
    assert list(log.lines())[-1]["warning"] == "it goes on"


NUM_PIECES = 3


def pieces(content: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Segments as three controllers would have written them: epoch, first byte and lines."""
    lines, begin = content.splitlines(keepends=True), 0
    size = len(lines) // NUM_PIECES + 1
    for number in range(NUM_PIECES):
        piece = b"".join(lines[number * size : (number + 1) * size])
        if piece:
            yield number + 1, begin, piece
        begin += len(piece)


def resumed(row: dict[str, object]) -> bool:
    return row.get("command") == "Resume"


def rows(file: Path) -> list[dict[str, object]]:
    parsed = []
    for line in file.read_bytes().splitlines():
        try:
            parsed.append(json.loads(line))
        except ValueError:
            continue
    return parsed


def nothing_is_lost(run: Path, before: dict[Path, bytes]) -> bool:
    """The content of a damaged file still exists, in one piece or two."""
    there = [file.read_bytes() for file in run.rglob("*") if file.is_file()]
    for file, content in before.items():
        is_there = content in there or (file.exists() and content in file.read_bytes())
        if is_there or file.parent.name == "lease":
            continue
        kept = file.read_bytes()
        size = next((i for i in range(len(content) + 1) if content[i:] in there), None)
        assert size is not None and kept[:size] == content[:size], file
    return True


def status(storage: Path, capsys: pytest.CaptureFixture[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["elastic", "status", "run", "--storage", str(storage)])
        with pytest.raises(SystemExit) as ended:
            main()
    assert len(capsys.readouterr().err.splitlines()) <= 1
    return int(ended.value.code or 0)


def test_a_garbage_lease_that_is_new_is_waited_out(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = tmp_path / "runs"
    shutil.copytree(trained, storage)
    lease_of(storage / "run").write_bytes(b"\0" * 80)
    with pytest.raises(RunRefused, match="try again in 15 s"):
        train(storage, MORE_STEPS)
    assert status(storage, capsys) == 0
    assert check_run("run", str(storage), False, Console(quiet=True)) == 0
    with pytest.raises(UserError, match="try again in 15 s"):
        check_run("run", str(storage), True, Console(quiet=True))


def test_the_command_line_refuses_in_one_line_with_exit_code_2(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    storage = tmp_path / "runs"
    shutil.copytree(trained, storage)
    near_the_end(storage / "run" / JOURNAL, b"garbage")
    common = ["--data", "random", "--storage", str(storage), "--in-process", "--steps", "12"]
    settings = [word for change in SETTINGS for word in ("--set", change)]
    train_line = ["train", "tiny", "--run-name", "run", *common, *settings]
    for arguments, said in (
        (train_line, "is no JSON object"),
        (["doctor", "--repair"], "needs the name of a run"),
        (["doctor", "other", "--storage", str(storage)], "there is no run"),
    ):
        monkeypatch.setattr(sys, "argv", ["elastic", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        assert ended.value.code == 2, told
        [line] = told.err.splitlines()
        assert said in line
