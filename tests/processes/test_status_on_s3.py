"""`elastic status` and `logs` of a run on a real S3 server, also while the server is down."""

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


def upload_run(run: WrittenRun, storage: Storage) -> None:
    """Upload the logs of a run to an object store, as a controller does."""
    for log in (run.folder.journal, run.folder.metrics):
        lines = open_lines(LineLog(storage, log.name))
        for line in log.lines():
            lines.write(line)
        lines.close()
    storage.write("recipe.json", b"{}")


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    sys.argv = ["elastic", *arguments]
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_status_and_logs_read_a_run_on_an_object_store(
    s3_proxy: S3Proxy, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    run = WrittenRun(tmp_path / "demo", now=time.time() - 10)
    run.start(2)
    run.commit()
    storage = open_storage(s3_proxy.url).at("demo")
    upload_run(run, storage)
    storage.write("logs/w0.out", b"hello\n")
    lease = claim(storage)
    try:
        before = storage.files()
        code, out, err = run_cli(capsys, "status", "demo", "--storage", s3_proxy.url, "--json")
        assert (code, err) == (0, "")
        status = json.loads(out)
        assert (status["phase"], status["step"], len(status["workers"])) == ("training", 1, 2)
        code, out, err = run_cli(
            capsys, "logs", "demo", "--worker", "w0", "--storage", s3_proxy.url
        )
        assert (code, err) == (0, "") and "hello" in out
        assert storage.files() == before
    finally:
        lease.release()
    code, out, err = run_cli(capsys, "status", "demo", "--storage", s3_proxy.url)
    assert code == 0 and "demo · not driven" in out
    s3_proxy.close()
    code, out, err = run_cli(capsys, "status", "demo", "--storage", s3_proxy.url)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "cannot be read" in err
    s3_proxy.open()
