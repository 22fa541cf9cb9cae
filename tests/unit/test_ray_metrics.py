"""The metrics for Prometheus, and the alerts and the dashboard that use them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from written_runs import WrittenRun

from actors.ray_backend.metrics import Metric
from elastic.protocol.events import Checkpointed
from elastic.protocol.notes import Waited
from pipelines.observe.history.history import read_history
from pipelines.observe.sidecar.run_metrics import metrics_of

ROOT = Path(__file__).parents[2]
ALERTS, BOARD = ROOT / "deploy" / "prometheus-alerts.yaml", ROOT / "deploy" / "grafana-board.json"
EXPORTED = re.compile(r"\bray_(elastic_\w+)")


def read_metrics(run: WrittenRun, later_s: float = 0.0) -> list[Metric]:
    return list(metrics_of(read_history(run.folder), run.now + later_s))


def read_values(run: WrittenRun, later_s: float = 0.0) -> dict[str, float | None]:
    return {metric.name: metric.value for metric in read_metrics(run, later_s)}


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    run = WrittenRun(tmp_path / "run")
    run.start(2)
    for _ in range(4):
        run.commit(step_s=0.5)
    run.sample("w1")
    return run


def test_metrics_show_step_workers_goodput_and_waits(run: WrittenRun) -> None:
    exported = read_values(run, later_s=10.0)
    assert (
        exported["elastic_step"],
        exported["elastic_workers"],
        exported["elastic_workers_lost"],
    ) == (
        4,
        2,
        0,
    )
    assert exported["elastic_since_step_s"] == exported["elastic_compute_s"] - 2.0 == 10.0
    assert exported["elastic_since_checkpoint_s"] == 12.5
    assert exported["elastic_goodput"] == pytest.approx(12 / 12.5)
    assert [(f.place, f.value) for f in read_metrics(run) if f.name == "elastic_worker_s"] == [
        ("node-0", 5.0)
    ]
    run.append_event(Checkpointed(4, 1, "x"))
    run.append_command(Waited("0 of at least 1 workers are ready"))
    exported = read_values(run, later_s=10.0)
    assert exported["elastic_waits_for_s"] == exported["elastic_since_checkpoint_s"] == 10.0


def test_peak_memory_is_shown_of_members_only(run: WrittenRun) -> None:
    def peaks() -> list[tuple[str, float | None]]:
        name = "elastic_peak_memory_bytes"
        return [(m.place, m.value) for m in read_metrics(run) if m.name == name]

    assert peaks() == [("w1", 3e9)]
    run.lose("w1")
    run.resume("w0")
    assert peaks() == [("w1", None)]


def test_metrics_of_a_stopped_run_raise_no_alert(run: WrittenRun) -> None:
    run.stop()
    exported = read_values(run, later_s=1e6)
    alerting_metrics = ("elastic_since_step_s", "elastic_since_checkpoint_s", "elastic_waits_for_s")
    assert [exported[name] for name in alerting_metrics] == [0.0, 0.0, 0.0]
    assert exported["elastic_compute_s"] == 2.0


def test_run_that_has_not_started_has_no_metrics(tmp_path: Path) -> None:
    assert read_metrics(WrittenRun(tmp_path / "none")) == []


@pytest.mark.parametrize("file", [ALERTS, BOARD], ids=lambda file: file.name)
def test_every_metric_in_alerts_and_dashboard_is_exported(file: Path, run: WrittenRun) -> None:
    named_metrics = set(EXPORTED.findall(file.read_text()))
    assert named_metrics
    assert named_metrics <= set(read_values(run))


def test_every_metric_is_documented(run: WrittenRun) -> None:
    documented = re.findall(
        r"^\| `(elastic_\w+)` \|", (ROOT / "docs" / "status.md").read_text(), re.M
    )
    assert documented == list(dict.fromkeys(metric.name for metric in read_metrics(run)))


def test_alerts_have_all_fields() -> None:
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    assert {rule["alert"] for rule in group["rules"]} == {
        "ElasticRunWaits",
        "ElasticStepsStalled",
        "ElasticNoCheckpoint",
        "ElasticGoodputLow",
    }
    for rule in group["rules"]:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert "$labels.run" in rule["annotations"]["summary"]


def test_dashboard_panels_do_not_overlap() -> None:
    board = json.loads(BOARD.read_text())
    used_cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["title"] and panel["targets"]
        position = panel["gridPos"]
        cells = {
            (position["x"] + x, position["y"] + y)
            for x in range(position["w"])
            for y in range(position["h"])
        }
        assert not cells & used_cells, f"{panel['title']} overlaps another panel"
        assert max(x for x, _ in cells) < 24
        used_cells |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
