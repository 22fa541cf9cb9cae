"""`elastic sweep` on a real Ray cluster."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path

import pytest
from command_line import elastic, on_own_cluster, ray_folder, read_lines
from mlflow import MlflowClient
from ray.cluster_utils import Cluster
from shared_cluster import on_shared_cluster

pytestmark = pytest.mark.timeout(900)
TINY = ("tiny", "--data", "random", "--set", "dtype=float64")


@pytest.mark.soak
def test_sweep_reports_measured_and_infeasible_layouts(tmp_path: Path) -> None:
    layouts = "dp=1; tp=2; tp=4"
    with on_shared_cluster(
        "sweep", tmp_path, *TINY, "--layouts", layouts, "--steps", "4"
    ) as command:
        code, output = command.finish()
    assert code == 0, output
    [folder] = (tmp_path / "sweeps").iterdir()
    dp1, tp2, tp4 = json.loads((folder / "sweep.json").read_text())
    assert [row["verdict"] for row in (dp1, tp2, tp4)] == ["ran", "ran", "not feasible"]
    assert "tp=4: not feasible: tp=4 does not divide 2" in output
    assert dp1["loss"] == pytest.approx(tp2["loss"], rel=1e-9), "the layouts differ"
    assert tp2["param_bytes"] == pytest.approx(dp1["param_bytes"] / 2, rel=0.05)
    assert tp2["optimizer_bytes"] == pytest.approx(dp1["optimizer_bytes"] / 2, rel=0.05)
    for row, name in ((dp1, "dp1"), (tp2, "tp2")):
        assert 0 < row["peak_bytes"] < 500e6
        steps = read_lines(folder / name / "metrics.jsonl")
        assert len(steps) == 4
        assert min(s["step_s"] for s in steps) <= row["step_s"] <= max(s["step_s"] for s in steps)
    with (folder / "sweep.csv").open() as file:
        assert [row["layout"] for row in csv.DictReader(file)] == ["dp=1", "tp=2", "tp=4"]
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("sweep")
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.run_name for run in runs} == {"dp1", "tp2"}
    assert {run.info.status for run in runs} == {"FINISHED"}


@pytest.mark.soak
def test_signal_ends_the_whole_sweep(tmp_path: Path) -> None:
    with on_own_cluster(
        "sweep", tmp_path, *TINY, "--layouts", "dp=1; dp=2", "--steps", "100000"
    ) as command:
        command.wait_until(
            lambda: any(map(read_lines, tmp_path.glob("sweeps/*/dp1/metrics.jsonl"))),
            "the first step",
        )
        command.process.send_signal(signal.SIGINT)
        code, output = command.finish()
    assert code == 130, output
    assert "dp=1: interrupted" in output and "Traceback" not in output
    assert not list(tmp_path.glob("sweeps/*/dp2/journal.jsonl"))


@pytest.mark.soak
def test_layout_without_enough_machines_is_reported_as_not_feasible(tmp_path: Path) -> None:
    """The cluster has one CPU and does not grow."""
    sweep = ("sweep", *TINY, "--layouts", "dp=2; dp=1", "--steps", "4", "--storage", str(tmp_path))
    with ray_folder() as folder:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "temp_dir": folder})
        try:
            ended = elastic(*sweep, "--start-timeout", "20", RAY_ADDRESS=cluster.address)
        finally:
            cluster.shutdown()
    assert ended.returncode == 0, ended.stderr
    refusal = "only 1 of 2 workers were ready within 20 s; add machines, or raise --start-timeout"
    assert f"dp=2: not feasible: {refusal}" in ended.stdout
    [rows] = (json.loads(path.read_text()) for path in tmp_path.glob("sweeps/*/sweep.json"))
    assert [row["verdict"] for row in rows] == ["not feasible", "ran"]
