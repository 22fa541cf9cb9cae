"""Plain sharding survives: what no living worker has comes out of snapshots, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Outcome, run_plainly

from actors.local.process_fleet import ProcessFleet
from actors.runtime.fault_spec import Fault
from pipelines.run.recipes import tiny
from pipelines.settings import CheckpointSettings, DataSettings

NUM_STEPS = 50
SETTINGS = tiny().model_copy(
    update={
        "data": DataSettings(source="random", seq_len=16),
        "dtype": "float64",
        "steps": NUM_STEPS,
        "eval_every": 0,
        "checkpoint": CheckpointSettings(every=0),
    }
)


def two_nodes(worker: str) -> str:
    """w0 and w1 on one, w2 and w3 on the other, and so on."""
    return f"node-{int(worker[1:]) // 2 % 2}"


def kill(*workers: str) -> Callable[[ProcessFleet], None]:
    def strike(fleet: ProcessFleet) -> None:
        pids = fleet.pids()
        for worker in workers:
            os.kill(pids[worker], signal.SIGKILL)

    return strike


def four_nodes(worker: str) -> str:
    """One each, replacements too."""
    return f"node-{int(worker[1:]) % 4}"


def kill_nodes(node_of: Callable[[str], str], *nodes: str) -> Callable[[ProcessFleet], None]:
    """All workers that pass for such on them, and their keepers."""

    def strike(fleet: ProcessFleet) -> None:
        for worker, pid in fleet.pids().items():
            if node_of(worker) in nodes:
                os.kill(pid, signal.SIGKILL)
        for node in nodes:
            os.kill(fleet.snapshot_server_pids()[node], signal.SIGKILL)

    return strike


def protections(folder: Path) -> list[dict[str, Any]]:
    """Each `StartSnapshots` so far of a run that goes on."""
    lines = (folder / "journal.jsonl").read_text().split("\n")[:-1]
    return [line for line in map(json.loads, lines) if line.get("command") == "StartSnapshots"]


def set_sizes(folder: Path) -> list[int]:
    """How many members the largest set has had in each."""
    return [max(map(len, line["sets"]), default=0) for line in protections(folder)]


def once_saved(folder: Path, strike: Callable[[ProcessFleet], None]) -> Callable[..., None]:
    """The same as soon as there is a checkpoint."""

    def wait(fleet: ProcessFleet) -> None:
        while not list(folder.glob("checkpoints/*/manifest.json")):
            time.sleep(0.01)
        strike(fleet)

    return lambda fleet: threading.Thread(target=wait, args=(fleet,), daemon=True).start()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_plainly(tmp_path_factory.mktemp("undisturbed"), SETTINGS, 1)


def assert_nothing_is_lost(run: Outcome, undisturbed: Outcome, num_recoveries: int = 1) -> None:
    """At most one step redone a recovery, none out of storage, the same losses."""
    assert run.stopped.outcome == "completed", run.stopped
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-9)
    recoveries = [line["source"] for line in run.told("Resharded")][1:]
    assert recoveries.count("snapshot") >= num_recoveries
    assert set(recoveries) <= {"snapshot", "live"}
    for line in run.told("RolledBack"):
        assert line["from_step"] - line["step"] <= 1, line


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("pp=2,fsdp=2", marks=pytest.mark.slow),
        pytest.param("fsdp=4", marks=pytest.mark.soak),
        pytest.param("tp=2,fsdp=2", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_alone_had_its_part(
    tmp_path: Path, undisturbed: Outcome, layout: str
) -> None:
    run = run_plainly(tmp_path, SETTINGS, 4, layout=layout, snapshot_every=1, strikes=[kill("w2")])
    assert_nothing_is_lost(run, undisturbed)


def test_who_dies_amid_a_snapshot_goes_back_to_the_one_before(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    """Its own copy of step 20 was there, that on the other node was not."""
    fault = Fault("kill", "w1", 20, "snapshot")
    run = run_plainly(
        tmp_path,
        SETTINGS,
        4,
        layout="fsdp=4",
        snapshot_every=1,
        node_of=two_nodes,
        faults=(fault,),
    )
    assert_nothing_is_lost(run, undisturbed)


@pytest.mark.slow
def test_a_whole_node(tmp_path: Path, undisturbed: Outcome) -> None:
    run = run_plainly(
        tmp_path,
        SETTINGS,
        4,
        layout="fsdp=4",
        snapshot_every=1,
        node_of=two_nodes,
        strikes=[kill_nodes(two_nodes, "node-1")],
    )
    assert_nothing_is_lost(run, undisturbed)


@pytest.mark.parametrize("layout", ["fsdp=4", pytest.param("pp=2,fsdp=2", marks=pytest.mark.slow)])
def test_a_whole_node_out_of_parities(tmp_path: Path, undisturbed: Outcome, layout: str) -> None:
    """Nobody has a copy of what that node had; with stages, parts differ in size."""
    run = run_plainly(
        tmp_path,
        SETTINGS,
        4,
        layout=layout,
        snapshot_every=1,
        snapshot_redundancy="xor:3",
        node_of=four_nodes,
        strikes=[kill_nodes(four_nodes, "node-2")],
    )
    assert_nothing_is_lost(run, undisturbed)
    told = run.told("StartSnapshots")[0]
    assert told["sets"] == [["w0", "w1", "w2", "w3"]]
    assert [len(snapshot_servers) for snapshot_servers in told["snapshot_servers"]] == [1, 1, 1, 1]


@pytest.mark.slow
def test_a_keeper_and_later_a_node(tmp_path: Path) -> None:
    """Without a keeper there are smaller sets; with it again, full ones, which a node's loss then
    needs."""
    settings = SETTINGS.model_copy(update={"steps": 150})

    def strike(fleet: ProcessFleet) -> None:
        before = fleet.snapshot_server_pids()
        os.kill(before["node-1"], signal.SIGKILL)
        while fleet.snapshot_server_pids().get("node-1", before["node-1"]) == before["node-1"]:
            time.sleep(0.01)
        while set_sizes(tmp_path)[:3] != [4, 3, 4]:
            time.sleep(0.01)
        time.sleep(0.3)
        kill_nodes(four_nodes, "node-2")(fleet)

    run = run_plainly(
        tmp_path,
        settings,
        4,
        layout="fsdp=4",
        snapshot_every=1,
        snapshot_redundancy="xor:3",
        node_of=four_nodes,
        strikes=[lambda fleet: threading.Thread(target=strike, args=(fleet,), daemon=True).start()],
    )
    lost_at = run.told("Resharded")[1]["step"]
    assert lost_at < 150, "the run was over before the node was lost"
    assert_nothing_is_lost(run, run_plainly(tmp_path / "whole", settings, 1))


@pytest.mark.slow
def test_a_keeper_that_stands_still_is_replaced(tmp_path: Path) -> None:
    """Its place is taken by one that then saves the run; it can do no harm when it comes back."""
    settings = SETTINGS.model_copy(update={"steps": 150})

    def strike(fleet: ProcessFleet) -> None:
        [(node, stopped)] = fleet.snapshot_server_pids().items()
        os.kill(stopped, signal.SIGSTOP)
        while fleet.snapshot_server_pids().get(node, stopped) == stopped:
            time.sleep(0.01)
        replaced_at = time.time()
        while not (told := protections(tmp_path)) or told[-1]["time"] < replaced_at:
            time.sleep(0.01)
        time.sleep(0.3)
        kill("w2")(fleet)

    run = run_plainly(
        tmp_path,
        settings,
        4,
        layout="fsdp=4",
        snapshot_every=1,
        strikes=[lambda fleet: threading.Thread(target=strike, args=(fleet,), daemon=True).start()],
    )
    assert run.told("StopSnapshotServer")[0]["cause"] == "no answer to a probe in 5 s"
    assert run.told("Resharded")[1]["step"] < 150, "the run was over before the worker was lost"
    assert_nothing_is_lost(run, run_plainly(tmp_path / "whole", settings, 1))


@pytest.mark.slow
def test_two_nodes_of_a_set_are_too_many(tmp_path: Path, undisturbed: Outcome) -> None:
    """It is told, and the run goes on from its checkpoint."""
    run = run_plainly(
        tmp_path,
        SETTINGS.model_copy(update={"checkpoint": CheckpointSettings(every=5)}),
        4,
        layout="fsdp=4",
        snapshot_every=1,
        snapshot_redundancy="xor:3",
        node_of=four_nodes,
        strikes=[once_saved(tmp_path, kill_nodes(four_nodes, "node-2", "node-3"))],
    )
    assert run.stopped.outcome == "completed", run.stopped
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-9)
    resharded = run.told("Resharded")[1]
    assert (resharded["source"], resharded["step"] % 5) == ("checkpoint", 0)


@pytest.mark.slow
def test_all_workers_of_the_only_node(tmp_path: Path, undisturbed: Outcome) -> None:
    """The keeper alone is left, and new workers begin from what it has."""
    everyone = kill("w0", "w1", "w2", "w3")
    run = run_plainly(tmp_path, SETTINGS, 4, layout="fsdp=4", snapshot_every=1, strikes=[everyone])
    assert_nothing_is_lost(run, undisturbed)


@pytest.mark.slow
def test_one_loss_after_another(tmp_path: Path, undisturbed: Outcome) -> None:
    """Each is waited for: with fewer workers the run might be over before the last."""
    run = run_plainly(
        tmp_path,
        SETTINGS,
        4,
        min_workers=4,
        layout="fsdp=4",
        snapshot_every=1,
        strikes=[kill("w1"), kill("w2"), kill("w3")],
    )
    assert_nothing_is_lost(run, undisturbed, num_recoveries=3)
