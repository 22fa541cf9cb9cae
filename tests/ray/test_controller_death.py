"""SIGKILL of the controller, and of drivers, on a real Ray cluster: the workers continue."""

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
from command_line import PATIENCE_S, Command, processes_of, read_lines
from shared_cluster import SharedCluster, elastic_train
from test_model_axes import SETTINGS, arguments

sys.path.append(str(Path(__file__).parents[1] / "processes"))

from expected import expected

from pipelines.run.recipes import load
from pipelines.settings.overrides import override

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
NUM_STEPS = 240


def assert_equals_undisturbed_run(
    command: Command, num_steps: int, settings: tuple[str, ...] = SETTINGS
) -> None:
    """Assert that each step is committed once, with the losses of the plain loop, and that no state
    is restored from storage."""
    losses_and_norms, _ = expected(override(load("tiny"), settings), num_steps)
    metrics = command.metrics()
    assert [line["step"] for line in metrics] == list(range(1, num_steps + 1))
    # Rounding errors grow: they are 1e-9 after about 450 steps, and 3e-7 after 600.
    losses = [loss for loss, _ in losses_and_norms][:NUM_STEPS]
    assert [line["loss"] for line in metrics][:NUM_STEPS] == pytest.approx(losses, rel=1e-9)
    assert not command.lines("RolledBack")
    assert len(command.lines("RunOpened")) == 1


@pytest.mark.soak
def test_controller_killed_twice_while_training_changes_nothing(tmp_path: Path) -> None:
    """The same processes continue in the same generation, even while there is no controller."""
    num_steps = 600  # enough for two restarts
    with elastic_train(tmp_path, *arguments("tiny", "dp=2", "2:2", num_steps)) as command:
        command.wait_for_step(10)
        for number in (1, 2):
            killed_at = command.kill_controller()
            command.wait_until(
                lambda number=number: len(command.lines("ControllerRestarted")) == number,
                "the restart of the controller",
            )
            restarted = command.lines("ControllerRestarted")[-1]
            # A step committed before the SIGKILL may be reported after it; such steps come first.
            command.wait_until(
                lambda restarted=restarted: command.metrics()[-1]["time"] > restarted["time"],
                "a step after the restart",
            )
            steps = [
                line for line in command.metrics() if killed_at < line["time"] < restarted["time"]
            ]
            print(
                f"back {restarted['time'] - killed_at:.2f} s after SIGKILL, "
                f"{len(steps)} steps committed meanwhile"
            )
            assert steps and {line["generation"] for line in steps} == {restarted["generation"]}
            assert not command.lines("Abort") and not command.lines("WorkerLost")
        assert len({line["pid"] for line in command.lines("WorkerReady")}) == 2
        code, output = command.finish()
        assert code == 0, output
        assert_equals_undisturbed_run(command, num_steps)
    assert output.count("controller restarted") == 2


def is_far_behind(command: Command) -> bool:
    """Whether workers are 110 steps ahead of the metrics. A controller that restarts before that is
    killed again: workers would still send reports to a controller that is only stopped."""
    is_far = newest_sampled_step(command) > command.metrics()[-1]["step"] + 110
    for process in [] if is_far else processes_of(command.ray_folder):
        with suppress(psutil.NoSuchProcess):
            if "RayController" in " ".join(process.cmdline()):
                process.kill()
    return is_far


def newest_sampled_step(command: Command) -> int:
    """The newest step in the workers' record of samples, which needs no controller."""
    return max((line["step"] for line in read_lines(command.folder / "samples.jsonl")), default=0)


@pytest.mark.soak
def test_controller_away_for_100_steps_loses_no_step_when_world_rank_0_dies(tmp_path: Path) -> None:
    """The survivor has the newest committed step: no step is repeated or lacks its metrics."""
    num_steps, settings = 600, (*SETTINGS, "batch=2")
    run = ["tiny", "--layout", "dp=2", "--workers", "1:2", "--steps", str(num_steps)]
    run += [word for setting in settings for word in ("--set", setting)]
    with elastic_train(tmp_path, *run, "--record-samples") as command:
        command.wait_for_step(10)
        first = command.lines("Resume")[0]["workers"][0]
        command.kill_controller()
        command.wait_until(
            lambda: is_far_behind(command), "110 steps that the controller does not know"
        )
        os.kill(command.pid_of(first), signal.SIGKILL)
        code, output = command.finish()
        assert code == 0, output
        assert_equals_undisturbed_run(command, num_steps, settings)
        assert not any(line["missing"] for line in command.metrics())
        known = command.lines("Abort")[0]["committed_step"]
        survived = command.lines("Quiesced")[0]["committed_step"]
        print(f"the controller knew step {known}, the survivor was at step {survived}")
        assert survived > known + 100, "the controller restarted too early to show anything"
        assert command.lines("SendRecords")


@pytest.mark.soak
def test_stop_request_while_the_controller_is_away_saves_a_checkpoint(tmp_path: Path) -> None:
    """The driver repeats its stop request: last checkpoint, end."""
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
def test_controller_killed_while_workers_start_starts_no_worker_twice(tmp_path: Path) -> None:
    """The restarted controller does not start the same workers again."""
    with elastic_train(tmp_path, *arguments("tiny", "dp=2", "2:2", 40)) as command:
        command.wait_until(lambda: command.lines("StartWorkers"), "the start of workers")
        command.kill_controller()
        code, output = command.finish()
        assert code == 0, output
        assert_equals_undisturbed_run(command, 40)
        assert len(command.lines("ControllerRestarted")) == 1
        assert len(command.lines("StartWorkers")) == 1
        assert len({line["pid"] for line in command.lines("WorkerReady")}) == 2


@pytest.mark.soak
def test_controller_killed_together_with_a_worker_recovers(tmp_path: Path) -> None:
    """No controller notices the loss, while the other workers wait in a collective."""
    with elastic_train(tmp_path, *arguments("tiny", "dp=3", "1:3", NUM_STEPS)) as command:
        command.wait_for_step(10)
        os.kill(command.pid_of("w0"), signal.SIGKILL)
        command.kill_controller()
        code, output = command.finish()
        assert code == 0, output
        assert_equals_undisturbed_run(command, NUM_STEPS)
        assert [line["worker"] for line in command.lines("WorkerLost")] == ["w0"]
        assert {"w1", "w2"} <= set(command.lines("Resume")[1]["workers"])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("moment", "line", "next_line"),
    [("forming", "Form", "Reshard"), ("resharding", "Reshard", "Resume")],
)
def test_controller_killed_during_a_recovery_recovers(
    tmp_path: Path, moment: str, line: str, next_line: str
) -> None:
    """One worker has died, and another is stopped at the moment at which the controller dies."""
    faults = ("--inject", "kill worker 0 at step 20", "--inject")
    stop = f"stop worker 1 while {moment} before step 20"
    run = arguments("tiny", "dp=3", "1:3", NUM_STEPS)
    with elastic_train(tmp_path, *run, *faults, stop) as command:

        def is_in_between() -> bool:
            begun_generations = {row["generation"] for row in command.lines(line)}
            ended_generations = {row["generation"] for row in command.lines(next_line)}
            return 2 in begun_generations and 2 not in ended_generations

        command.wait_until(is_in_between, f"the {line} of generation 2")
        command.kill_controller()
        code, output = command.finish()
        assert code == 0, output
        assert_equals_undisturbed_run(command, NUM_STEPS)
        assert command.lines("ControllerRestarted")
        assert {"w0", "w1"} <= {line["worker"] for line in command.lines("WorkerLost")}


@pytest.mark.soak
def test_workers_outlive_a_controller_that_gets_its_lease_late(tmp_path: Path) -> None:
    """The new controller greets them before it takes the lease and replays. Without a greeting they
    would end as orphans after 30 s."""
    run = (*arguments("tiny", "dp=2", "2:2", 100_000), "--set", "failure.orphan_timeout_s=30")
    with elastic_train(tmp_path, *run) as command:
        command.wait_for_step(10)
        lease, away = command.folder / "lease", command.folder / "lease.away"
        command.kill_controller()
        lease.rename(away)
        lease.write_text("not a folder")
        time.sleep(36.0)
        lease.unlink()
        away.rename(lease)
        command.wait_until(
            lambda: command.lines("ControllerRestarted"), "the restart of the controller"
        )
        known = command.metrics()[-1]["step"]
        command.wait_until(
            lambda: command.metrics()[-1]["step"] > known, "a step after the restart"
        )
        assert not command.lines("WorkerLost")
        assert len({line["pid"] for line in command.lines("WorkerReady")}) == 2
        command.process.terminate()
        code, output = command.finish()
        assert code == 143, output


def wait_for(condition: Callable[[], object], awaited: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for {awaited}"
        time.sleep(0.1)


def test_attached_run_stops_after_its_driver_is_killed(
    tmp_path: Path, shared_ray_cluster: SharedCluster
) -> None:
    """The run saves a last checkpoint and stops."""
    run = (*arguments("tiny", "dp=2", "2:2", 100_000), "--set", "failure.driver_timeout_s=10")
    command = shared_ray_cluster.start(tmp_path, *run)
    command.wait_for_step(10)
    command.process.send_signal(signal.SIGKILL)
    command.process.communicate()
    wait_for(lambda: command.lines("Stopped"), "the end")
    [stopped] = command.lines("Stopped")
    assert (stopped["outcome"], stopped["reason"]) == ("interrupted", "the driver is gone")
    assert command.lines("Checkpointed")[-1]["step"] == stopped["step"]


@pytest.mark.soak
def test_detached_run_completes_after_its_controller_dies(
    tmp_path: Path, shared_ray_cluster: SharedCluster
) -> None:
    run = arguments("tiny", "dp=2", "2:2", 10 * NUM_STEPS)
    command = shared_ray_cluster.start(tmp_path, *run, "--detach")
    assert command.finish()[0] == 0
    wait_for(lambda: len(command.metrics()) >= 10, "step 10")
    second = shared_ray_cluster.start(tmp_path, *run)
    code, output = second.finish()
    assert code == 2, output
    assert sum("drives this run" in line for line in output.splitlines()) == 1
    assert "Traceback" not in output
    command.kill_controller()
    wait_for(lambda: command.lines("Stopped"), "the end")
    assert command.lines("Stopped")[-1]["outcome"] == "completed"
    assert command.lines("ControllerRestarted")
    assert_equals_undisturbed_run(command, 10 * NUM_STEPS)


@pytest.mark.soak
def test_one_of_two_simultaneous_drivers_is_refused(
    tmp_path: Path, shared_ray_cluster: SharedCluster
) -> None:
    run = arguments("tiny", "dp=2", "2:2", 40)
    drivers = [shared_ray_cluster.start(tmp_path, *run) for _ in range(2)]
    ended = sorted(driver.finish() for driver in drivers)
    assert [code for code, _ in ended] == [0, 2], ended
    assert "drives this run" in ended[1][1] and "Traceback" not in ended[1][1]
