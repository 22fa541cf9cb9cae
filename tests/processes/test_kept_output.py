"""The newest output of a process, including that of C code, is stored in the folder of its run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from actors.worker.worker_output import KEPT_BYTES, copy_output, kept_name

PROGRAM = """
import os, sys, time
from pathlib import Path
from actors.worker.worker_output import KeptOutput
from actors.storage.storage import open_storage

print(":actor_name:RayWorker\\nhello", flush=True)
os.write(2, b"from below Python\\n")
output = KeptOutput(open_storage(sys.argv[1]), "w0")
output.hurry()
deadline = time.monotonic() + 60
while not Path(sys.argv[1], "logs", "w0.err").exists() and time.monotonic() < deadline:
    time.sleep(0.01)
sys.stdout.write("x" * 2**17 + "the end\\n")
sys.stdout.flush()
output.keep()
output.keep()
"""


def test_newest_output_of_both_streams_is_stored(tmp_path: Path) -> None:
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
        subprocess.run(command, stdout=out, stderr=err, check=True, timeout=120)
    stored = (tmp_path / "run" / kept_name("w0", "out")).read_bytes()
    assert len(stored) == KEPT_BYTES and stored.endswith(b"xthe end\n")
    assert b"from below Python\n" in (tmp_path / "run" / kept_name("w0", "err")).read_bytes()


@pytest.mark.parametrize("stream", [subprocess.PIPE, subprocess.DEVNULL], ids=["pipe", "null"])
def test_output_to_a_pipe_or_null_is_not_stored(tmp_path: Path, stream: int) -> None:
    program = PROGRAM.partition("deadline")[0] + "output.keep()\n"
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    subprocess.run(command, stdout=stream, stderr=stream, check=True, timeout=120)
    assert not (tmp_path / "run").exists()


def test_copy_of_the_files_has_what_a_killed_process_flushed(tmp_path: Path) -> None:
    program = PROGRAM.partition("output.hurry")[0] + (
        'output.keep()\nprint("the last line", flush=True)\nos.kill(os.getpid(), 9)\n'
    )
    run, files = tmp_path / "run", {"out": tmp_path / "out", "err": tmp_path / "err"}
    with open(files["out"], "wb") as out, open(files["err"], "wb") as err:
        command = [sys.executable, "-c", program, str(run)]
        killed = subprocess.run(command, stdout=out, stderr=err, check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert b"the last line" not in (run / kept_name("w0", "out")).read_bytes()
    written_at = (run / kept_name("w0", "err")).stat().st_mtime_ns
    copy_output(str(run), "w0", files)
    assert (run / kept_name("w0", "out")).read_bytes().endswith(b"hello\nthe last line\n")
    assert (run / kept_name("w0", "err")).stat().st_mtime_ns == written_at, "nothing new, no write"


def test_copy_of_long_output_has_its_newest_bytes(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"x" * 2 * KEPT_BYTES + b"the end\n")
    copy_output(str(tmp_path / "run"), "w0", {"out": tmp_path / "out"})
    stored = (tmp_path / "run" / kept_name("w0", "out")).read_bytes()
    assert len(stored) == KEPT_BYTES and stored.endswith(b"the end\n")
