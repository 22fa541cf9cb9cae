"""Sharding without replicas: the regions that no surviving worker holds come from snapshots."""

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
from harness import Outcome, run_in_processes

from actors.controller.shell import Shell
from actors.local.process_fleet import ProcessFleet
from actors.runtime.fault_spec import Fault
from elastic.protocol.events import Event, StepCommitted, StopRequested
from elastic.protocol.snapshot_events import SnapshotTimed
from elastic.reshard.snapshot_interval import AUTO_EVERY, interval_for
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
    """w0 and w1 on one node, w2 and w3 on the other, and so on."""
    return f"node-{int(worker[1:]) // 2 % 2}"


def kill(*workers: str) -> Callable[[ProcessFleet], None]:
    def inject(fleet: ProcessFleet) -> None:
        pids = fleet.pids()
        for worker in workers:
            os.kill(pids[worker], signal.SIGKILL)

    return inject


def four_nodes(worker: str) -> str:
    """One worker on each node, also for replacements."""
    return f"node-{int(worker[1:]) % 4}"


def kill_nodes(node_of: Callable[[str], str], *nodes: str) -> Callable[[ProcessFleet], None]:
    """Kill all workers that `node_of` places on the nodes, and the snapshot servers there."""

    def inject(fleet: ProcessFleet) -> None:
        for worker, pid in fleet.pids().items():
            if node_of(worker) in nodes:
                os.kill(pid, signal.SIGKILL)
        for node in nodes:
            os.kill(fleet.snapshot_server_pids()[node], signal.SIGKILL)

    return inject


def read_snapshot_commands(folder: Path) -> list[dict[str, Any]]:
    """Read the `StartSnapshots` commands so far of a running run."""
    lines = (folder / "journal.jsonl").read_text().split("\n")[:-1]
    return [line for line in map(json.loads, lines) if line.get("command") == "StartSnapshots"]


def read_set_sizes(folder: Path) -> list[int]:
    """The size of the largest snapshot set in each command."""
    return [max(map(len, line["sets"]), default=0) for line in read_snapshot_commands(folder)]


def after_checkpoint(folder: Path, inject: Callable[[ProcessFleet], None]) -> Callable[..., None]:
    """Inject the fault as soon as a checkpoint exists."""

    def wait(fleet: ProcessFleet) -> None:
        while not list(folder.glob("checkpoints/*/manifest.json")):
            time.sleep(0.01)
        inject(fleet)

    return lambda fleet: threading.Thread(target=wait, args=(fleet,), daemon=True).start()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_in_processes(tmp_path_factory.mktemp("undisturbed"), SETTINGS, 1)


def assert_recovered_from_snapshots(
    run: Outcome, undisturbed: Outcome, num_recoveries: int = 1
) -> None:
    """Each recovery repeats at most one step, none reads storage, and the losses are the same."""
    assert run.stopped.outcome == "completed", run.stopped
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-9)
    recoveries = [line["source"] for line in run.lines_of("Resharded")][1:]
    assert recoveries.count("snapshot") >= num_recoveries
    assert set(recoveries) <= {"snapshot", "live"}
    for line in run.lines_of("RolledBack"):
        assert line["from_step"] - line["step"] <= 1, line


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("pp=2,fsdp=2", marks=pytest.mark.slow),
        pytest.param("fsdp=4", marks=pytest.mark.soak),
        pytest.param("tp=2,fsdp=2", marks=pytest.mark.soak),
    ],
)
def test_loss_of_the_only_holder_of_a_shard_recovers_from_snapshots(
    tmp_path: Path, undisturbed: Outcome, layout: str
) -> None:
    run = run_in_processes(
        tmp_path, SETTINGS, 4, layout=layout, snapshot_every=1, fleet_faults=[kill("w2")]
    )
    assert_recovered_from_snapshots(run, undisturbed)


def test_death_during_a_snapshot_rolls_back_to_the_previous_snapshot(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    """Its own node has the snapshot of step 20, but the other node does not."""
    fault = Fault("kill", "w1", 20, "snapshot")
    run = run_in_processes(
        tmp_path,
        SETTINGS,
        4,
        layout="fsdp=4",
        snapshot_every=1,
        node_of=two_nodes,
        faults=(fault,),
    )
    assert_recovered_from_snapshots(run, undisturbed)


@pytest.mark.slow
def test_loss_of_a_node_recovers_from_snapshots(tmp_path: Path, undisturbed: Outcome) -> None:
    run = run_in_processes(
        tmp_path,
        SETTINGS,
        4,
        layout="fsdp=4",
        snapshot_every=1,
        node_of=two_nodes,
        fleet_faults=[kill_nodes(two_nodes, "node-1")],
    )
    assert_recovered_from_snapshots(run, undisturbed)


@pytest.mark.parametrize("layout", ["fsdp=4", pytest.param("pp=2,fsdp=2", marks=pytest.mark.slow)])
def test_loss_of_a_node_recovers_from_parity(
    tmp_path: Path, undisturbed: Outcome, layout: str
) -> None:
    """No node has a copy of the lost node's snapshot; with stages, the shards differ in size."""
    run = run_in_processes(
        tmp_path,
        SETTINGS,
        4,
        layout=layout,
        snapshot_every=1,
        snapshot_redundancy="xor:3",
        node_of=four_nodes,
        fleet_faults=[kill_nodes(four_nodes, "node-2")],
    )
    assert_recovered_from_snapshots(run, undisturbed)
    command = run.lines_of("StartSnapshots")[0]
    assert command["sets"] == [["w0", "w1", "w2", "w3"]]
    assert [len(snapshot_servers) for snapshot_servers in command["snapshot_servers"]] == [
        1,
        1,
        1,
        1,
    ]


@pytest.mark.soak
def test_loss_of_a_snapshot_server_and_later_of_a_node_recovers_from_parity(tmp_path: Path) -> None:
    """While a snapshot server is down, the sets are smaller. When it is back they are full, and the
    run needs them after it loses a node."""
    settings = SETTINGS.model_copy(update={"steps": 150})

    def inject(fleet: ProcessFleet) -> None:
        old_pids = fleet.snapshot_server_pids()
        os.kill(old_pids["node-1"], signal.SIGKILL)
        while fleet.snapshot_server_pids().get("node-1", old_pids["node-1"]) == old_pids["node-1"]:
            time.sleep(0.01)
        while read_set_sizes(tmp_path)[:3] != [4, 3, 4]:
            time.sleep(0.01)
        time.sleep(0.3)
        kill_nodes(four_nodes, "node-2")(fleet)

    run = run_in_processes(
        tmp_path,
        settings,
        4,
        layout="fsdp=4",
        snapshot_every=1,
        snapshot_redundancy="xor:3",
        node_of=four_nodes,
        fleet_faults=[
            lambda fleet: threading.Thread(target=inject, args=(fleet,), daemon=True).start()
        ],
    )
    lost_at = run.lines_of("Resharded")[1]["step"]
    assert lost_at < 150, "the run was over before the node was lost"
    assert_recovered_from_snapshots(run, run_in_processes(tmp_path / "whole", settings, 1))


@pytest.mark.soak
def test_frozen_snapshot_server_is_replaced(tmp_path: Path) -> None:
    """A new snapshot server takes its place, from which the run then recovers. The old server does
    no harm when it continues."""
    settings = SETTINGS.model_copy(update={"steps": 150})

    def inject(fleet: ProcessFleet) -> None:
        [(node, stopped_pid)] = fleet.snapshot_server_pids().items()
        os.kill(stopped_pid, signal.SIGSTOP)
        while fleet.snapshot_server_pids().get(node, stopped_pid) == stopped_pid:
            time.sleep(0.01)
        replaced_at = time.time()
        while (
            not (commands := read_snapshot_commands(tmp_path)) or commands[-1]["time"] < replaced_at
        ):
            time.sleep(0.01)
        time.sleep(0.3)
        kill("w2")(fleet)

    run = run_in_processes(
        tmp_path,
        settings,
        4,
        layout="fsdp=4",
        snapshot_every=1,
        fleet_faults=[
            lambda fleet: threading.Thread(target=inject, args=(fleet,), daemon=True).start()
        ],
    )
    assert run.lines_of("StopSnapshotServer")[0]["cause"] == "no answer to a probe in 5 s"
    assert run.lines_of("Resharded")[1]["step"] < 150, "the run was over before the worker was lost"
    assert_recovered_from_snapshots(run, run_in_processes(tmp_path / "whole", settings, 1))


@pytest.mark.slow
def test_loss_of_two_nodes_of_a_set_rolls_back_to_the_checkpoint(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    """The run continues from its checkpoint."""
    run = run_in_processes(
        tmp_path,
        SETTINGS.model_copy(update={"checkpoint": CheckpointSettings(every=5)}),
        4,
        layout="fsdp=4",
        snapshot_every=1,
        snapshot_redundancy="xor:3",
        node_of=four_nodes,
        fleet_faults=[after_checkpoint(tmp_path, kill_nodes(four_nodes, "node-2", "node-3"))],
    )
    assert run.stopped.outcome == "completed", run.stopped
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-9)
    resharded = run.lines_of("Resharded")[1]
    assert (resharded["source"], resharded["step"] % 5) == ("checkpoint", 0)


@pytest.mark.slow
def test_loss_of_all_workers_of_the_only_node_recovers_from_snapshots(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    """Only the snapshot server is left, and new workers recover from its snapshots."""
    all_workers = kill("w0", "w1", "w2", "w3")
    run = run_in_processes(
        tmp_path, SETTINGS, 4, layout="fsdp=4", snapshot_every=1, fleet_faults=[all_workers]
    )
    assert_recovered_from_snapshots(run, undisturbed)


@pytest.mark.slow
def test_three_consecutive_losses_recover_from_snapshots(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    """Four workers are the minimum: with fewer, the run might end before the last loss."""
    run = run_in_processes(
        tmp_path,
        SETTINGS,
        4,
        min_workers=4,
        layout="fsdp=4",
        snapshot_every=1,
        fleet_faults=[kill("w1"), kill("w2"), kill("w3")],
    )
    assert_recovered_from_snapshots(run, undisturbed, num_recoveries=3)


class ReportCostlySnapshots:
    """Reports at each step that a snapshot costs w0 five hundredths of a step, which the quick
    copies of a small model do not, and stops the run once it has lost a worker, has been given the
    interval of that cost, and has trained for `NUM_STEPS`."""

    share = 0.05

    def __init__(self, folder: Path) -> None:
        self.shells: list[Shell] = []
        self._folder = folder
        self._is_stopping = False

    def on_event(self, event: Event) -> None:
        if not isinstance(event, StepCommitted) or self._is_stopping:
            return
        self.shells[0].post(SnapshotTimed("w0", event.generation, self.share))
        if event.generation > 1 and event.record.step > NUM_STEPS and self._is_obeyed():
            self._is_stopping = True
            self.shells[0].post(StopRequested("the interval is longer"))

    def _is_obeyed(self) -> bool:
        return interval_for(self.share, 1) in [
            line["every"] for line in read_snapshot_commands(self._folder)
        ]


def test_automatic_interval_grows_and_a_loss_costs_no_more_steps(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    costs = ReportCostlySnapshots(tmp_path)
    run = run_in_processes(
        tmp_path,
        SETTINGS.model_copy(update={"steps": 100 * NUM_STEPS}),
        4,
        layout="fsdp=4",
        snapshot_every=AUTO_EVERY,
        fleet_faults=[kill("w2")],
        on_shell=costs.shells.append,
        on_event=costs.on_event,
    )
    assert run.stopped.outcome == "interrupted", run.stopped
    losses = run.losses()
    first_losses = {step: losses[step] for step in range(1, NUM_STEPS + 1)}
    assert first_losses == pytest.approx(undisturbed.losses(), rel=1e-9)
    intervals = [line["every"] for line in run.lines_of("StartSnapshots")]
    assert intervals[0] == 1 and max(intervals) > 1, intervals
    assert run.lines_of("SnapshotTimed")
    for line in run.lines_of("RolledBack"):
        assert line["from_step"] - line["step"] <= max(intervals), line
