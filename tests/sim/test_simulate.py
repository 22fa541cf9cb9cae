"""`elastic simulate`: the real controller over traces, with the policy that users get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from actors.simulation.simulation import SimulationResult, simulate
from pipelines.errors import UserError
from pipelines.simulation import simulate as command
from pipelines.simulation.outcome import SystemOutcome, outcome_of
from pipelines.simulation.plan import plan_run
from pipelines.simulation.request import SimulateRequest

pytestmark = pytest.mark.slow

STEADY = "time,node,event\n0,a,add\n0,b,add\n0,c,add\n0,d,add\n"
TRACE = STEADY + "600,b,remove\n900,b,add\n1200,a,remove\n1200,c,remove\n1800,a,add\n3600,e,add\n"
FACTS = ("step_s=1", "warm_up_s=10", "detect_s=4")


def run_trace(
    folder: Path, text: str, **options: object
) -> tuple[SystemOutcome, SimulationResult, list[dict[str, object]]]:
    """Simulate a trace; return the outcome, the result and the lines of the journal."""
    path = folder / "trace.csv"
    path.write_text(text)
    run = plan_run(SimulateRequest(str(path), cost=FACTS, **options))  # type: ignore[arg-type]
    journal: list[dict[str, object]] = []
    result = simulate(run, lambda line, is_metrics: None if is_metrics else journal.append(line))
    return outcome_of(run, result, None), result, journal


def test_steady_cluster_loses_only_its_start(tmp_path: Path) -> None:
    outcome, result, _ = run_trace(tmp_path, STEADY + "3600,e,add\n", workers="1:4")
    assert result.ledger.started_s == pytest.approx(10, abs=1)
    assert outcome.goodput == pytest.approx(1 - 10 / 3600, abs=1e-3)
    assert outcome.redone == 0
    assert outcome.pauses_s == ()
    assert outcome.steps == pytest.approx(3590, abs=40), "60 checkpoints add 0.05 s each"


def test_each_loss_and_each_growth_is_one_pause(tmp_path: Path) -> None:
    outcome, result, journal = run_trace(tmp_path, TRACE)
    commands = [line.get("command") for line in journal]
    assert commands.count("Abort") == 2
    assert commands.count("Resume") == 5
    assert len(outcome.pauses_s) == 4
    assert sum(pause_s > 4 for pause_s in outcome.pauses_s) == 2, "two losses are detected late"
    assert outcome.redone == 0, "each survivor has the whole state"
    assert 0.98 < outcome.goodput < 0.998
    assert result.outcome.reason == "the trace ends"


def test_notice_saves_the_detection(tmp_path: Path) -> None:
    silent, *_ = run_trace(tmp_path, TRACE)
    announced, *_ = run_trace(tmp_path, TRACE, notice_s=60.0)
    assert max(announced.pauses_s) < 4 < max(silent.pauses_s)
    assert announced.goodput > silent.goodput


def test_lost_shard_comes_from_a_snapshot_and_redoes_at_most_one_step(tmp_path: Path) -> None:
    outcome, _, journal = run_trace(tmp_path, TRACE, layout="fsdp=4", batch=4)
    sources = [line["source"] for line in journal if line.get("command") == "Reshard"]
    assert sources.count("snapshot") >= 1
    assert outcome.redone <= 2
    assert outcome.goodput > 0.98


def test_without_snapshots_a_lost_shard_goes_back_to_the_checkpoint(tmp_path: Path) -> None:
    changes = ("snapshot.every=0", "checkpoint.every=5min")
    outcome, _, journal = run_trace(tmp_path, TRACE, layout="fsdp=4", batch=4, changes=changes)
    assert [line for line in journal if line.get("command") == "RolledBack"]
    assert outcome.redone > 100
    assert outcome.goodput < 0.95


def test_run_waits_for_the_fewest_workers(tmp_path: Path) -> None:
    outcome, _, journal = run_trace(tmp_path, TRACE, workers="4:4")
    waits = [line["reason"] for line in journal if line.get("command") == "Waited"]
    assert any("of at least 4 workers" in str(reason) for reason in waits)
    assert outcome.goodput < 0.7


def test_run_grows_from_one_worker_in_rounds(tmp_path: Path) -> None:
    """One member would send the state to 39 others for longer than a reshard may take."""
    late = "".join(f"80,n{i},add\n" for i in range(39))
    trace = "time,node,event\n0,first,add\n" + late + "3600,n0,remove\n"
    outcome, _, journal = run_trace(tmp_path, trace, state_bytes=2e10)
    resumes = [len(line["workers"]) for line in journal if line.get("command") == "Resume"]  # type: ignore[arg-type]
    assert resumes == [1, 9, 40]
    assert outcome.redone == 0


def test_run_with_enough_time_completes(tmp_path: Path) -> None:
    outcome, result, _ = run_trace(tmp_path, TRACE, steps=500)
    assert result.outcome.outcome == "completed"
    assert outcome.steps == 500
    assert outcome.finish_s == pytest.approx(515, abs=10)


def test_command_prints_and_writes(tmp_path: Path) -> None:
    trace, results, picture = (tmp_path / name for name in ("t.csv", "r.json", "p.png"))
    trace.write_text(TRACE)
    console = Console(record=True, width=110)
    request = SimulateRequest(str(trace), price=3.0, json=str(results), plot=str(picture))
    assert command.simulate(request, console) == 0
    printed = console.export_text()
    assert "5 changes, 3 nodes lost" in printed
    row, *others = json.loads(results.read_text())["systems"]
    assert [other["system"] for other in others] == ["torchrun", "Ray Train"]
    assert all(other["goodput"] < row["goodput"] for other in others)
    assert f"{row['goodput']:.2%}" in printed
    assert row["cost"] == pytest.approx(
        3.0 * (600 * 4 + 300 * 3 + 300 * 4 + 600 * 2 + 1800 * 3) / 3600
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_variants_are_compared_in_one_table(tmp_path: Path) -> None:
    trace, results = tmp_path / "t.csv", tmp_path / "r.json"
    trace.write_text(TRACE)
    console = Console(record=True, width=130)
    compare = ("snapshot.every=0,1", "layout=fsdp=4;dp=2,fsdp=2")
    request = SimulateRequest(str(trace), batch=8, compare=compare, json=str(results))
    assert command.simulate(request, console) == 0
    rows = {row["system"]: row for row in json.loads(results.read_text())["systems"]}
    names = [
        f"snapshot.every={every} layout={layout}"
        for every in (0, 1)
        for layout in ("fsdp=4", "dp=2,fsdp=2")
    ]
    assert list(rows) == names, "restart systems would have the workers of one variant"
    assert rows[names[2]]["goodput"] > rows[names[0]]["goodput"], "snapshots save the lost shards"
    printed = console.export_text()
    assert all(f"{rows[name]['goodput']:.2%}" in printed for name in names)


SHORT = STEADY + "600,a,remove\n600,b,remove\n4000,e,add\n4000,f,add\n7200,g,add\n"
MARKET = ("market.on_demand_after_s=300", "market.retry_spot_after_s=900")
PRICES = ("market.spot_price=1", "market.on_demand_price=3")


def run_market(
    folder: Path, *changes: str, cost: tuple[str, ...] = FACTS, steps: int | None = None
) -> tuple[SystemOutcome, list[dict[str, object]]]:
    """Simulate `SHORT`: two of four spot nodes go at 600 s, and others come at 4,000 s."""
    path = folder / "trace.csv"
    path.write_text(SHORT)
    request = SimulateRequest(
        str(path), workers="1:4", cost=cost, steps=steps, changes=(*MARKET, *PRICES, *changes)
    )
    run, journal = plan_run(request), list[dict[str, object]]()
    result = simulate(run, lambda line, is_metrics: None if is_metrics else journal.append(line))
    return outcome_of(run, result, None), journal


def test_on_demand_machines_replace_lost_spot_machines_until_these_come_again(
    tmp_path: Path,
) -> None:
    outcome, journal = run_market(tmp_path, "market.use=fallback")
    spot, _ = run_market(tmp_path, "market.use=spot")
    chosen = [line for line in journal if line.get("command") == "MarketChosen"]
    assert (chosen[0]["market"], chosen[0]["num_workers"]) == ("on-demand", 2)
    assert chosen[0]["time"] == pytest.approx(600 + 4 + 300, abs=20)
    assert outcome.steps > spot.steps + 800 and outcome.redone == 0
    assert [line["time"] for line in journal if line.get("command") == "Abort"] == [
        pytest.approx(604, abs=5)
    ], "the exchange is a planned pause"
    assert outcome.spot_h is not None and outcome.on_demand_h is not None
    assert 1.5 < outcome.on_demand_h < 2.5, "two machines from about 1,030 s to 5,000 s"
    assert outcome.cost == pytest.approx(outcome.spot_h + 3 * outcome.on_demand_h)
    assert spot.on_demand_h == 0


def test_run_on_demand_uses_no_machine_of_the_trace(tmp_path: Path) -> None:
    outcome, _ = run_market(tmp_path, "market.use=on_demand", steps=1000)
    assert outcome.spot_h == 0 and outcome.on_demand_h is not None
    assert outcome.finish_s == pytest.approx(1000 + 120 + 10, abs=20)


def test_run_without_on_demand_machines_trains_on_with_what_it_has(tmp_path: Path) -> None:
    cost = (*FACTS, "on_demand_nodes=0")
    outcome, journal = run_market(tmp_path, "market.use=fallback", cost=cost)
    spot, _ = run_market(tmp_path, "market.use=spot")
    assert outcome.on_demand_h == 0 and outcome.steps > 0.9 * spot.steps
    markets = [line["market"] for line in journal if line.get("command") == "MarketChosen"]
    assert markets[:3] == ["on-demand", "spot", "on-demand"]


def test_deadline_uses_on_demand_machines_only_as_far_as_needed(tmp_path: Path) -> None:
    done_by, _ = run_market(tmp_path, "market.use=fallback", "market.done_by=115min", steps=5000)
    fallback, _ = run_market(tmp_path, "market.use=fallback", steps=5000)
    assert fallback.finish_s is not None and done_by.finish_s is not None
    assert fallback.finish_s < done_by.finish_s < 115 * 60
    assert done_by.on_demand_h is not None and fallback.on_demand_h is not None
    assert 0 < done_by.on_demand_h < fallback.on_demand_h


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost": ("step=1",)}, "--cost: there is no step; similar: step_s"),
        ({"cost": ("step_s",)}, "--cost step_s: write key=value"),
        ({"cost": ("step_s=0",)}, "step_s: input should be greater than 0"),
        ({"step_s": -1.0}, "--step-s: step_s: input should be greater than 0"),
        ({"costs": "no.json"}, "--costs no.json: cannot be read"),
        ({"state_bytes": float("nan")}, "--state-bytes nan: give a number"),
        ({"workers": "4:2"}, "MIN is greater than MAX"),
        ({"layout": "dq=2"}, "--layout dq=2"),
        ({"layout": "dp=64"}, "--layout dp=64"),
        ({"changes": ("snapshot.redundancy=xor:2",)}, "has no parity; use copy"),
        ({"compare": ("snapshot.every",)}, "--compare snapshot.every: write KEY=VALUE,VALUE"),
        ({"compare": ("snapshot.every=1,,2",)}, "write KEY=VALUE,VALUE"),
        ({"compare": ("workers=1:2", "workers=1:3")}, "give all its values in one option"),
        ({"compare": ("snapshot.often=1,2",)}, "snapshot.often"),
        ({"compare": ("snapshot.every=" + "1," * 64 + "1",)}, "65 variants; compare at most 64"),
        ({"compare": ("layout=dp=64;dp=1",)}, "--layout dp=64"),
        ({"compare": ("snapshot.every=1,2",), "plot": "p.png"}, "--plot draws one run"),
        ({"generate": "nodes=3"}, "give a trace or --generate"),
        ({"json": "/no/folder/x.json"}, "--json /no/folder/x.json: cannot be written"),
        ({"plot": "/no/folder/x.png"}, "--plot /no/folder/x.png: cannot be written"),
    ],
)
def test_mistakes_get_one_line(tmp_path: Path, options: dict[str, object], message: str) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("time,node,event\n0,a,add\n0,b,add\n60,b,remove\n")
    request = SimulateRequest(str(trace), **options)  # type: ignore[arg-type]
    with pytest.raises(UserError) as refused:
        command.simulate(request, Console(quiet=True))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
