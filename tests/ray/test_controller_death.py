"""SIGKILL of the controller, and of drivers, on a real Ray: the workers train on."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from command_line import PATIENCE_S, Command, processes_of, read
from shared_cluster import SharedCluster, elastic_train
from test_model_axes import SETTINGS, arguments

sys.path.append(str(Path(__file__).parents[1] / "processes"))

from expected import expected

from pipelines.run.recipes import load
from pipelines.settings.overrides import override

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
NUM_STEPS = 240


def assert_undisturbed(
    command: Command, num_steps: int, settings: tuple[str, ...] = SETTINGS
) -> None:
    """Every step once, with the losses of the plain loop; nothing came out of storage."""
    seen, _ = expected(override(load("tiny"), settings), num_steps)
    metrics = command.metrics()
    assert [line["step"] for line in metrics] == list(range(1, num_steps + 1))
    # Rounding grows: after some 450 steps it is 1e-9, after 600 it is 3e-7.
    losses = [loss for loss, _ in seen][:NUM_STEPS]
    assert [line["loss"] for line in metrics][:NUM_STEPS] == pytest.approx(losses, rel=1e-9)
    assert not command.lines("RolledBack")
    assert len(command.lines("RunOpened")) == 1


@pytest.mark.soak
def test_killed_twice_while_training(tmp_path: Path) -> None:
    """The same processes train on, in the same generation, also while nobody hears them."""
    num_steps = 600  # enough for two absences
    with elastic_train(tmp_path, *arguments("tiny", "dp=2", "2:2", num_steps)) as command:
        command.wait_for_step(10)
        for number in (1, 2):
            killed = command.kill_controller()
            command.wait_until(
                lambda number=number: len(command.lines("ControllerRestarted")) == number,
                "the controller's return",
            )
            back = command.lines("ControllerRestarted")[-1]
            # What was committed before the SIGKILL may be told after it, and comes first.
            command.wait_until(
                lambda back=back: command.metrics()[-1]["time"] > back["time"],
                "a step after its return",
            )
            told = [line for line in command.metrics() if killed < line["time"] < back["time"]]
            print(
                f"back {back['time'] - killed:.2f} s after SIGKILL, "
                f"{len(told)} steps committed meanwhile"
            )
            assert told and {line["generation"] for line in told} == {back["generation"]}
            assert not command.lines("Abort") and not command.lines("WorkerLost")
        assert len({line["pid"] for line in command.lines("WorkerReady")}) == 2
        code, output = command.finish()
        assert code == 0, output
        assert_undisturbed(command, num_steps)
    assert output.count("controller restarted") == 2


def is_far_behind(command: Command) -> bool:
    """Whether workers are 110 steps beyond what a controller has written down. One that comes back
    before is killed: a process that only stood still would still be sent reports."""
    is_far = newest_sampled_step(command) > command.metrics()[-1]["step"] + 110
    for process in [] if is_far else processes_of(command.ray_folder):
        with suppress(psutil.NoSuchProcess):
            if "RayController" in " ".join(process.cmdline()):
                process.kill()
    return is_far


def newest_sampled_step(command: Command) -> int:
    """Workers write down what they read, whoever hears them."""
    return max((line["step"] for line in read(command.folder / "samples.jsonl")), default=0)


def test_away_for_over_100_steps_and_then_world_rank_0_dies(tmp_path: Path) -> None:
    """The survivor's committed step is the truth: no step is redone, none lacks its numbers."""
    num_steps, settings = 600, (*SETTINGS, "batch=2")
    run = ["tiny", "--layout", "dp=2", "--workers", "1:2", "--steps", str(num_steps)]
    run += [word for setting in settings for word in ("--set", setting)]
    with elastic_train(tmp_path, *run, "--record-samples") as command:
        command.wait_for_step(10)
        first = command.lines("Resume")[0]["workers"][0]
        command.kill_controller()
        command.wait_until(lambda: is_far_behind(command), "110 steps that no controller heard of")
        os.kill(command.pid_of(first), signal.SIGKILL)
        code, output = command.finish()
        assert code == 0, output
        assert_undisturbed(command, num_steps, settings)
        assert not any(line["missing"] for line in command.metrics())
        known = command.lines("Abort")[0]["committed_step"]
        stood = command.lines("Quiesced")[0]["committed_step"]
        print(f"the controller knew step {known}, the survivor stood at step {stood}")
        assert stood > known + 100, "it came back too early to show anything"
        assert command.lines("SendRecords")


@pytest.mark.soak
def test_a_stop_asked_for_while_it_is_away(tmp_path: Path) -> None:
    """The driver asks again: last checkpoint, end."""
    with elastic_train(tmp_path, *arguments("tiny", "dp=2", "2:2", 100_000)) as command:
        command.wait_for_step(10)
        command.kill_controller()
        command.process.terminate()
        code, output = command.finish()
        assert code == 143, output
        [stopped] = command.lines("Stopped")
        assert stopped["outcome"] == "interrupted"
        assert command.lines("Checkpointed")[-1]["step"] == stopped["step"]
        assert command.lines("ControllerRestarted")


@pytest.mark.soak
def test_killed_while_workers_start(tmp_path: Path) -> None:
    """Those that have been started are not started twice."""
    with elastic_train(tmp_path, *arguments("tiny", "dp=2", "2:2", 40)) as command:
        command.wait_until(lambda: command.lines("StartWorkers"), "the start of workers")
        command.kill_controller()
        code, output = command.finish()
        assert code == 0, output
        assert_undisturbed(command, 40)
        assert len(command.lines("ControllerRestarted")) == 1
        assert len(command.lines("StartWorkers")) == 1
        assert len({line["pid"] for line in command.lines("WorkerReady")}) == 2


@pytest.mark.soak
def test_killed_together_with_a_worker(tmp_path: Path) -> None:
    """Nobody is there to notice the loss; the others wait for it in a collective."""
    with elastic_train(tmp_path, *arguments("tiny", "dp=3", "1:3", NUM_STEPS)) as command:
        command.wait_for_step(10)
        os.kill(command.pid_of("w0"), signal.SIGKILL)
        command.kill_controller()
        code, output = command.finish()
        assert code == 0, output
        assert_undisturbed(command, NUM_STEPS)
        assert [line["worker"] for line in command.lines("WorkerLost")] == ["w0"]
        assert {"w1", "w2"} <= set(command.lines("Resume")[1]["workers"])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("moment", "line", "next_line"),
    [("forming", "Form", "Reshard"), ("resharding", "Reshard", "Resume")],
)
def test_killed_amid_a_recovery(tmp_path: Path, moment: str, line: str, next_line: str) -> None:
    """One worker has died, and another stands still where the controller is to die."""
    faults = ("--inject", "kill worker 0 at step 20", "--inject")
    stop = f"stop worker 1 while {moment} before step 20"
    run = arguments("tiny", "dp=3", "1:3", NUM_STEPS)
    with elastic_train(tmp_path, *run, *faults, stop) as command:

        def is_amid() -> bool:
            told = [told["generation"] for told in command.lines(line)]
            return 2 in told and not any(t["generation"] == 2 for t in command.lines(next_line))

        command.wait_until(is_amid, f"the {line} of generation 2")
        command.kill_controller()
        code, output = command.finish()
        assert code == 0, output
        assert_undisturbed(command, NUM_STEPS)
        assert command.lines("ControllerRestarted")
        assert {"w0", "w1"} <= {line["worker"] for line in command.lines("WorkerLost")}


@pytest.mark.soak
def test_workers_outlive_a_controller_that_cannot_take_its_run_for_long(tmp_path: Path) -> None:
    """It greets them before it takes the lease and replays: after 30 s without a sign of it they
    would end themselves as orphans."""
    run = (*arguments("tiny", "dp=2", "2:2", 100_000), "--set", "orphan_timeout_s=30")
    with elastic_train(tmp_path, *run) as command:
        command.wait_for_step(10)
        lease, away = command.folder / "lease", command.folder / "lease.away"
        command.kill_controller()
        lease.rename(away)
        lease.write_text("not a folder")
        time.sleep(36.0)
        lease.unlink()
        away.rename(lease)
        command.wait_until(lambda: command.lines("ControllerRestarted"), "the controller's return")
        known = command.metrics()[-1]["step"]
        command.wait_until(lambda: command.metrics()[-1]["step"] > known, "a step after its return")
        assert not command.lines("WorkerLost")
        assert len({line["pid"] for line in command.lines("WorkerReady")}) == 2
        command.process.terminate()
        code, output = command.finish()
        assert code == 143, output


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.1)


def test_the_driver_of_an_attached_run_is_killed(
    tmp_path: Path, cluster_of_all: SharedCluster
) -> None:
    """The run stops cleanly after a last checkpoint."""
    run = (*arguments("tiny", "dp=2", "2:2", 100_000), "--set", "driver_timeout_s=10")
    command = cluster_of_all.start(tmp_path, *run)
    command.wait_for_step(10)
    command.process.send_signal(signal.SIGKILL)
    command.process.communicate()
    wait_for(lambda: command.lines("Stopped"), "the end")
    [stopped] = command.lines("Stopped")
    assert (stopped["outcome"], stopped["reason"]) == ("interrupted", "the driver is gone")
    assert command.lines("Checkpointed")[-1]["step"] == stopped["step"]


@pytest.mark.soak
def test_a_detached_run_goes_on_also_without_its_controller(
    tmp_path: Path, cluster_of_all: SharedCluster
) -> None:
    run = arguments("tiny", "dp=2", "2:2", 2 * NUM_STEPS)
    command = cluster_of_all.start(tmp_path, *run, "--detach")
    assert command.finish()[0] == 0
    wait_for(lambda: len(command.metrics()) >= 10, "step 10")
    again = cluster_of_all.start(tmp_path, *run)
    code, output = again.finish()
    assert code == 2, output
    assert sum("drives this run" in line for line in output.splitlines()) == 1
    assert "Traceback" not in output
    command.kill_controller()
    wait_for(lambda: command.lines("Stopped"), "the end")
    assert command.lines("Stopped")[-1]["outcome"] == "completed"
    assert command.lines("ControllerRestarted")
    assert_undisturbed(command, 2 * NUM_STEPS)


@pytest.mark.soak
def test_of_two_drivers_at_once_one_is_refused(
    tmp_path: Path, cluster_of_all: SharedCluster
) -> None:
    run = arguments("tiny", "dp=2", "2:2", 40)
    drivers = [cluster_of_all.start(tmp_path, *run) for _ in range(2)]
    ended = sorted(driver.finish() for driver in drivers)
    assert [code for code, _ in ended] == [0, 2], ended
    assert "drives this run" in ended[1][1] and "Traceback" not in ended[1][1]
