"""A dry run prints the plan of a run; it starts and writes nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from actors.distributed.torch_names import NAMES
from pipelines.cli import main
from pipelines.run.plan import TrainRequest, make_plan, store_recipe


@pytest.fixture
def dry_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run_command(*arguments: str) -> str:
        words = ["elastic", "train", "tiny", "--dry-run", *arguments]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as exited:
            main()
        assert not exited.value.code
        return " ".join(capsys.readouterr().out.split())

    return run_command


def test_dry_run_announces_the_preparation_of_text(tmp_path: Path, dry_run) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    before = sorted(tmp_path.rglob("*"))
    out = dry_run("--storage", str(tmp_path / "runs"), "--data", str(tmp_path / "a.txt"))
    assert "1 file, 1.00kB to be prepared first" in out
    assert "nothing: there is no run" in out
    assert sorted(tmp_path.rglob("*")) == before


def test_dry_run_announces_the_packing_of_conversations(tmp_path: Path, dry_run) -> None:
    turns = [{"role": "user", "content": "hm?"}, {"role": "assistant", "content": "yes"}]
    file = tmp_path / "chats.jsonl"
    file.write_text(f"{json.dumps({'messages': turns})}\n" * 3)
    chat = ("--set", "data.format=chat", "--set", "model.vocab_size=300")
    out = dry_run("--storage", str(tmp_path / "runs"), "--data", str(file), *chat)
    assert "1 file" in out and "to be prepared first" in out
    assert [file] == sorted(tmp_path.rglob("*"))


def test_dry_run_prints_layout_and_memory_for_most_and_fewest_workers(
    tmp_path: Path, dry_run
) -> None:
    out = dry_run("--data", "random", "--workers", "2:4", "--layout", "fsdp=4", "--storage", "x")
    assert "4 workers fsdp=4" in out and "2 workers dp=2" in out
    job = make_plan(TrainRequest("tiny", data="random"), num_gpus=0).run.opening.job
    whole = (job.state_bytes + job.param_bytes) / 1e6
    assert f"{whole:.2f}MB of parameters, gradients and optimizer per worker; " in out
    assert (
        f"{1000 * whole / 4:.3g}kB of parameters, gradients and optimizer per worker (optimizer"
        in out
    )


def test_dry_run_announces_the_run_that_it_would_resume(tmp_path: Path, dry_run) -> None:
    plan = make_plan(TrainRequest("tiny", "run", str(tmp_path), data="random"), num_gpus=0)
    store_recipe(plan)
    out = dry_run("--data", "random", "--storage", str(tmp_path), "--run-name", "run")
    assert "'run' from step 0: it has no complete checkpoint" in out
    assert plan.recipe["data_digest"] in out


def test_a_run_is_refused_if_torch_lacks_a_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(NAMES, "torch._gone", ("first",))
    monkeypatch.setattr(sys, "argv", ["elastic", "train", "tiny", "--data", "random", "--dry-run"])
    with pytest.raises(SystemExit) as exited:
        main()
    [line] = capsys.readouterr().err.splitlines()
    assert exited.value.code == 2 and "has no torch._gone.first" in line


def test_dry_run_says_why_workers_will_stand_by(dry_run) -> None:
    batch = ("--set", "batch=2", "--set", "microbatch=2")
    out = dry_run("--data", "random", "--workers", "1:4", "--storage", "x", *batch)
    assert "3 workers stand by: a step has 1 microbatch: use more, smaller microbatches" in out
    assert "1 worker dp=1" in out and out.count("stand by") == 1
