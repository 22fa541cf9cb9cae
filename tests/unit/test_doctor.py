"""`elastic doctor`: the verdicts and fixes of its checks; it leaves no files behind."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from actors.runtime.network import Network, listen
from actors.storage.errors import UnhealthyMachine
from pipelines.cli import main
from pipelines.doctor import machine, places, software
from pipelines.doctor.cluster import node_software
from pipelines.doctor.finding import Finding


@pytest.mark.parametrize(
    ("finding", "verdict", "fix"),
    [
        (software.python_version("3.10.2", ">=3.11"), "failed", "install Python >=3.11"),
        (software.python_version("3.13.0", ">=3.11"), "ok", ""),
        (software.package_version(Requirement("torch>=2.11"), "2.13.0+cu130"), "ok", ""),
        (software.package_version(Requirement("torch>=2.11"), "2.9.1"), "failed", "'torch>=2.11'"),
        (software.package_version(Requirement("mlflow>=3.7"), None), "failed", "'mlflow>=3.7'"),
        (software.torch_names("2.13.0+cu130", []), "ok", ""),
        (software.torch_names("2.99.0", []), "warning", "pip install torch=="),
        (software.torch_names("2.13.0", ["torch._gone"]), "failed", "pip install torch=="),
        (software.gpus_seen(None, "13.0", []), "ok", ""),
        (software.gpus_seen("580.1", None, []), "failed", "CUDA build of torch"),
        (software.gpus_seen("470.1", "13.0", []), "failed", "CUDA_VISIBLE_DEVICES"),
        (software.gpus_seen("580.1", "13.0", ["H100", "H100"]), "ok", ""),
        (machine.open_files(1024), "warning", "ulimit -n"),
        (machine.open_files(128), "failed", "ulimit -n"),
        (machine.open_files(65536), "ok", ""),
        (machine.shared_memory(64 * 2**20), "warning", "--shm-size"),
        (machine.swap(40 * 10**9, 100 * 10**9), "warning", "swapoff"),
        (machine.swap(0, 100 * 10**9), "ok", ""),
        (places.storage_speed("/x", False, 1.0, 1.0), "failed", "use another"),
        (places.storage_speed("/x", True, 10.0, 0.1), "warning", "checkpoint.every"),
        (places.storage_speed("/x", True, 0.1, 0.1), "ok", ""),
        (places.clock("it", 105.0, (100.0, 101.0)), "warning", "NTP"),
        (places.clock("it", 90.0, (100.0, 101.0)), "warning", "NTP"),
        (places.clock("it", 99.5, (100.0, 101.0)), "ok", ""),
        (node_software("n", {"ray": "2", "sources": "a"}, {"ray": "2", "sources": "a"}), "ok", ""),
        (node_software("n", {"sources": "a"}, {"sources": "b"}), "failed", "working-dir"),
        (node_software("n", {"torch": "2.9"}, {"torch": "2.11"}), "warning", "same environment"),
    ],
)
def test_finding_has_a_fix_unless_it_is_ok(finding: Finding, verdict: str, fix: str) -> None:
    assert finding.verdict == verdict, finding
    assert fix in finding.fix and bool(finding.fix) == (verdict != "ok")


def test_driver_version_is_parsed() -> None:
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 2023\nGCC"
    assert software.driver_version(text) == "535.129.03"
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
    assert software.driver_version(text) == "580.95.05"


def test_port_in_use_fails() -> None:
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    findings = list(machine.network(Network(ports=(port, port)), "127.0.0.1"))
    listener.close()
    assert [finding.verdict for finding in findings] == ["ok", "failed"]
    assert "--ports" in findings[1].fix


def test_clock_with_whole_seconds_is_not_behind() -> None:
    """The second of the server may have started before the request."""
    now = time.time()
    assert places.clock("it", float(int(now)), (now, now)).value == "same as this machine"


def test_unavailable_places_fail_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("no database")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert places.database(uri, tmp_path / "mlflow.db").verdict == "failed"
    [finding] = places.tracking("http://127.0.0.1:1", str(tmp_path))
    assert finding.verdict == "failed" and "--tracking-uri" in finding.fix
    finding = places.data(str(tmp_path / "nowhere"), str(tmp_path))
    assert finding.verdict == "failed" and "nowhere" in finding.value


def test_failed_check_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    storage = tmp_path / "runs"
    monkeypatch.setattr(sys, "argv", ["elastic", "doctor", "--storage", str(storage)])
    with pytest.raises(SystemExit) as exited:
        main()
    output = capsys.readouterr().out
    assert exited.value.code == 1
    assert "1 failed" in output and "unset RAY_ADDRESS" in output.replace("\n", "")
    assert not list(tmp_path.iterdir()), "doctor leaves no files behind"


def test_healthy_device_is_reported_with_its_speed() -> None:
    findings = list(machine.devices())
    assert findings and all(f.verdict == "ok" and not f.fix for f in findings)
    assert "ms for a matrix product" in findings[0].value


def test_device_that_computes_wrongly_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> float:
        raise UnhealthyMachine("3 of 9 entries are wrong")

    monkeypatch.setattr(machine, "time_product", fail)
    [finding, *_] = machine.devices()
    assert (finding.verdict, finding.value) == ("failed", "3 of 9 entries are wrong")
    assert "no worker may train" in finding.fix
