"""The program behind `make gpu`, tried on the CPU, and the page that it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import gpu  # noqa: E402
import gpu_groups  # noqa: E402
import gpu_reshard  # noqa: E402
import gpu_runs  # noqa: E402
import gpu_step  # noqa: E402

FAST = ("batch=4", "microbatch=1")


def test_page_says_what_has_been_measured() -> None:
    assert gpu.PAGE.read_text() == gpu.render(gpu.recorded()), "run benchmarks/gpu.py --page-only"


def test_page_without_measurements_says_so_in_each_row() -> None:
    lines = [line for line in gpu.render({}).splitlines() if line.startswith("| ")]
    assert len(lines) == len(gpu.ROWS) + 2
    assert all("not run" in line for line in lines[2:])


def test_failed_part_is_named_in_its_rows() -> None:
    measured = {"date": "today", "commit": "abc", "machine": "a GPU", "tests": "5 passed"}
    page = gpu.render({**measured, "failures": {"groups": "failed: RuntimeError: no link"}})
    assert "| abort of a blocked collective | failed: RuntimeError: no link | |" in page
    assert "| tests/gpu | 5 passed | |" in page


def test_no_part_imports_ray_or_mlflow() -> None:
    """A machine with a GPU may have neither."""
    modules = ["gpu", *(file.stem for file in (ROOT / "tests" / "gpu").glob("[!_c]*.py"))]
    folders = ("", "benchmarks", "tests", "tests/processes", "tests/gpu")
    code = f"""
import sys
sys.modules.update(ray=None, mlflow=None)
sys.path[:0] = {[str(ROOT / folder) for folder in folders]}
from importlib import import_module
for name in {modules}:
    import_module(name)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_groups_form_again_after_each_abort() -> None:
    measured = gpu_groups.measure("cpu", num_cycles=5)
    assert measured["num_ranks"] == 2
    assert 0 < measured["form_s"] < 10 and measured["slowest_abort_s"] < 10


def test_reshard_moves_all_bytes() -> None:
    measured = gpu_reshard.measure("cpu", 2**22)
    assert measured["bytes"] == 2**21, "each of two shards moves"
    assert measured["ours_s"] > 0 and measured["bare_s"] > 0


@pytest.mark.soak
def test_our_step_and_the_bare_loop_train_alike() -> None:
    measured = gpu_step.measure("cpu")
    assert measured["our_loss"] == pytest.approx(measured["bare_loss"], rel=2e-2)
    # Float32 weights, gradients and two moments of AdamW: 16 bytes; the copies are in bfloat16.
    assert measured["state_bytes"] >= 16 * measured["num_params"]
    assert measured["step_flops"] > 0 and measured["ours_s"] > 0 and measured["bare_s"] > 0


@pytest.mark.soak
def test_stalls_and_recoveries_are_measured_in_whole_runs() -> None:
    stalls = gpu_runs.measure_stalls("cpu", FAST)
    assert 0 < stalls["without_copies_s"] < 5 and 0 < stalls["with_snapshots_s"] < 5
    kills = gpu_runs.measure_kills("cpu", FAST, num_kills=2)
    assert 0 < kills["recovery_s"] <= kills["slowest_recovery_s"] < 30
    assert kills["num_survivors_lost"] == 0
