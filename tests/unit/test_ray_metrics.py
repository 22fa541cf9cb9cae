"""The metrics for Prometheus, and the alerts and the dashboard that use them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from written_runs import WrittenRun

from actors.ray_backend.metrics import Metric
from elastic.protocol.commands import Waited
from elastic.protocol.events import Checkpointed
from pipelines.observe.history.history import read_history
from pipelines.observe.sidecar.run_metrics import metrics_of

ROOT = Path(__file__).parents[2]
ALERTS, BOARD = ROOT / "deploy" / "prometheus-alerts.yaml", ROOT / "deploy" / "grafana-board.json"
EXPORTED = re.compile(r"\bray_(elastic_\w+)")


def figures(run: WrittenRun, later_s: float = 0.0) -> list[Metric]:
    return list(metrics_of(read_history(run.folder), run.now + later_s))


def values(run: WrittenRun, later_s: float = 0.0) -> dict[str, float | None]:
    return {figure.name: figure.value for figure in figures(run, later_s)}


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    written = WrittenRun(tmp_path / "run")
    written.start(2)
    for _ in range(4):
        written.commit(step_s=0.5)
    return written


def test_they_say_how_the_run_stands(run: WrittenRun) -> None:
    told = values(run, later_s=10.0)
    assert (told["elastic_step"], told["elastic_workers"], told["elastic_workers_lost"]) == (
        4,
        2,
        0,
    )
    assert told["elastic_since_step_s"] == told["elastic_compute_s"] - 2.0 == 10.0
    assert told["elastic_since_checkpoint_s"] == 12.5
    assert told["elastic_goodput"] == pytest.approx(12 / 12.5)
    assert [(f.place, f.value) for f in figures(run) if f.name == "elastic_worker_s"] == [
        ("node-0", 5.0)
    ]
    run.append_event(Checkpointed(4, 1, "x"))
    run.append_command(Waited("0 of at least 1 workers are ready"))
    told = values(run, later_s=10.0)
    assert told["elastic_waits_for_s"] == told["elastic_since_checkpoint_s"] == 10.0


def test_a_run_that_has_stopped_raises_no_alarm(run: WrittenRun) -> None:
    run.stop()
    told = values(run, later_s=1e6)
    late = ("elastic_since_step_s", "elastic_since_checkpoint_s", "elastic_waits_for_s")
    assert [told[name] for name in late] == [0.0, 0.0, 0.0]
    assert told["elastic_compute_s"] == 2.0


def test_a_run_that_has_not_begun_has_none(tmp_path: Path) -> None:
    assert figures(WrittenRun(tmp_path / "none")) == []


@pytest.mark.parametrize("file", [ALERTS, BOARD], ids=lambda file: file.name)
def test_every_metric_that_is_named_is_exported(file: Path, run: WrittenRun) -> None:
    named = set(EXPORTED.findall(file.read_text()))
    assert named
    assert named <= set(values(run))


def test_every_figure_stands_in_the_docs(run: WrittenRun) -> None:
    told = re.findall(r"^\| `(elastic_\w+)` \|", (ROOT / "docs" / "status.md").read_text(), re.M)
    assert told == list(dict.fromkeys(figure.name for figure in figures(run)))


def test_the_alerts_are_whole() -> None:
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    assert {rule["alert"] for rule in group["rules"]} == {
        "ElasticRunWaits",
        "ElasticStepsStandStill",
        "ElasticNoCheckpoint",
        "ElasticGoodputLow",
    }
    for rule in group["rules"]:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert "$labels.run" in rule["annotations"]["summary"]


def test_the_board_has_its_panels_side_by_side() -> None:
    board = json.loads(BOARD.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["title"] and panel["targets"]
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies over another"
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
