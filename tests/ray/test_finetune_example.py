"""The fine-tuning example, unchanged, on a private Ray cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import PATIENCE_S, ROOT, assert_no_process_left, ray_folder, read_lines


@pytest.mark.soak
def test_finetuning_example_trains_adapters_that_peft_loads(tmp_path: Path) -> None:
    with ray_folder() as folder:
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_ADDRESS": "local",
            "RAY_TMPDIR": folder,
            "HF_HUB_OFFLINE": "1",
        }
        ended = subprocess.run(
            ["sh", str(ROOT / "examples" / "finetune.sh")],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            cwd=tmp_path,
            env=environment,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert_no_process_left(folder)
    assert ended.stdout.splitlines()[-1].startswith("loaded ")
    metrics = read_lines(tmp_path / "runs" / "tuned" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 31)), "no step is repeated"
    assert len({line["world_size"] for line in metrics}) > 1
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.3
