"""`elastic status` and `logs` of a run on a real S3 server, also while that does not answer."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from s3 import S3Proxy
from written_runs import WrittenRun

from actors.storage.lease import claim
from actors.storage.line_logs import LineLog
from actors.storage.line_writers import open_lines
from actors.storage.storage import Storage, open_storage
from pipelines.cli import main


def shipped(run: WrittenRun, there: Storage) -> None:
    """The run's lines as a controller brings them to an object store."""
    for log in (run.folder.journal, run.folder.metrics):
        lines = open_lines(LineLog(there, log.name))
        for line in log.lines():
            lines.write(line)
        lines.close()
    there.write("recipe.json", b"{}")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    sys.argv = ["elastic", *arguments]
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_a_run_on_an_object_store(
    s3_proxy: S3Proxy, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    run = WrittenRun(tmp_path / "demo", now=time.time() - 10)
    run.start(2)
    run.commit()
    there = open_storage(s3_proxy.url).at("demo")
    shipped(run, there)
    there.write("logs/w0.out", b"hello\n")
    lease = claim(there)
    try:
        before = there.files()
        code, out, err = told(capsys, "status", "demo", "--storage", s3_proxy.url, "--json")
        assert (code, err) == (0, "")
        status = json.loads(out)
        assert (status["phase"], status["step"], len(status["workers"])) == ("training", 1, 2)
        code, out, err = told(capsys, "logs", "demo", "--worker", "w0", "--storage", s3_proxy.url)
        assert (code, err) == (0, "") and "hello" in out
        assert there.files() == before
    finally:
        lease.release()
    code, out, err = told(capsys, "status", "demo", "--storage", s3_proxy.url)
    assert code == 0 and "demo · not driven" in out
    s3_proxy.close()
    code, out, err = told(capsys, "status", "demo", "--storage", s3_proxy.url)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "cannot be read" in err
    s3_proxy.open()
