"""A user's script that uses the Python API with its own Ray, and prints what it observes.

python user_script.py STORAGE
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray
import ray.data
from ray import tune
from ray.train import Result, RunConfig, ScalingConfig, TrainingFailedError

from pipelines.api import Callback, ElasticTrainer, UserError
from pipelines.custom_data.from_ray import from_ray_dataset
from pipelines.run.recipes import tiny
from pipelines.settings import TrainSettings

NUM_CPUS = 4
ENDLESS = 100_000
PATIENCE_S = 120.0


def small():
    """The recipe `tiny` with another seed, to recognize it."""
    return tiny().model_copy(update={"dtype": "float64", "seed": 11})


class Seen(Callback):
    """Writes down what it was called for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_step(self, step) -> None:
        self.calls.append(f"step {step.number}")

    def on_reshard(self, reshard) -> None:
        self.calls.append(f"reshard {reshard.step}")

    def on_end(self, result) -> None:
        self.calls.append(f"end {result.outcome}")


class WritesItsRun(Callback):
    """Writes the steps of each run to a file of its name."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.steps: list[int] = []

    def on_start(self, run) -> None:
        self.file = Path(self.folder) / f"{run.name}.steps"

    def on_step(self, step) -> None:
        self.steps.append(step.number)

    def on_end(self, result) -> None:
        self.file.write_text(json.dumps(self.steps))


class RaisesAtStep3(Callback):
    def on_step(self, step) -> None:
        if step.number == 3:
            raise ValueError("the third")


def trainer(storage: str, name: str, workers: Any, **arguments: Any) -> ElasticTrainer:
    run = RunConfig(name=name, storage_path=storage)
    scaling = ScalingConfig(num_workers=workers)
    options = {"data": "random", "verbose": 0, **arguments}
    return ElasticTrainer(small, scaling_config=scaling, run_config=run, **options)


def summarize(result: Result) -> dict[str, Any]:
    with result.checkpoint.as_directory() as folder:
        checkpoint = folder
    table = result.metrics_dataframe
    return {
        "metrics": result.metrics,
        "steps": table["step"].tolist(),
        "losses": table["loss"].tolist(),
        "generations": sorted(set(table["generation"].tolist())),
        "checkpoint": checkpoint,
        "path": result.path,
        "error": result.error,
    }


def fit_runs(storage: str) -> dict[str, Any]:
    """Fit a run that is shown and loses a worker, and a run that fails."""
    fault, seen = ["kill worker 1 at step 4"], Seen()
    callbacks = {"callbacks": [seen, RaisesAtStep3]}
    result = trainer(storage, "mine", (1, 2), steps=8, inject=fault, verbose=1, **callbacks).fit()
    try:
        trainer(storage, "broken", 1, steps=8, inject=["raise in worker 0 at step 3"]).fit()
    except TrainingFailedError as error:
        called = {"called": seen.calls, "failed_callbacks": result.failed_callbacks}
        return {"shown": summarize(result), "failure": str(error), **called}
    raise AssertionError("it should have failed")


def control_run(storage: str) -> dict[str, Any]:
    """Resume the run in the background: look at it, reshard it, get a refusal, stop it."""
    observed: dict[str, Any] = {}
    seen = Seen()
    endless = trainer(storage, "mine", 2, steps=ENDLESS, layout="dp=2", callbacks=[seen])
    with endless.start() as run:
        wait_for(run, 10)
        observed["reshard"] = run.reshard("fsdp=2")
        try:
            run.reshard("fsdp=3")
        except UserError as error:
            observed["refusal"] = str(error)
        try:
            run.result(timeout_s=0.1)
        except TimeoutError as error:
            observed["timeout"] = str(error)
        step = len(run.metrics)
        wait_for(run, step + 2)
        observed["status"] = run.status
        observed["representation"] = repr(run)
        observed["stopped"] = summarize(run.stop())
        observed["events"] = run.events["kind"].tolist()
        observed["called"] = seen.calls
    return observed


def wait_for(run: Any, step: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(run.metrics) < step:
        assert time.monotonic() < deadline and not run.is_over, repr(run)
        time.sleep(0.1)


def run_trials(storage: str) -> dict[str, Any]:
    """Run two trials at once; Tune ends each long before its last step."""
    callbacks = [WritesItsRun(storage)]
    unused = trainer(storage, "unused", 1, steps=ENDLESS, callbacks=callbacks)
    trainable = unused.as_trainable(report_every=2)
    grid = tune.Tuner(
        trainable,
        param_space={"optimizer.lr": tune.grid_search([1e-3, 1e-2])},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(name="search", storage_path=f"{storage}/tune", stop={"step": 6}),
    ).fit()
    return {
        "errors": [str(error) for error in grid.errors],
        "trials": [result.metrics for result in grid],
        "best": grid.get_best_result().metrics["run"],
    }


def read_ray_data(storage: str) -> dict[str, Any]:
    """Read rows of Ray Data as samples by index; they are written once."""
    dataset = ray.data.range(40).map(lambda row: {"square": row["id"] ** 2})
    folder = f"{storage}/rows"
    rows = from_ray_dataset(dataset, folder)
    reopened = from_ray_dataset(None, folder)
    return {"squares": [int(row["square"]) for row in rows], "again": len(reopened)}


def remaining_actors() -> list[str]:
    """The named actors that are left. Tune may end a trial's process before the trial has ended its
    actors; they then end themselves once their driver has been silent for
    `failure.driver_timeout_s`."""
    end = time.monotonic() + TrainSettings().failure.driver_timeout_s + 30.0
    while True:
        names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        if not names or time.monotonic() > end:
            return names
        time.sleep(0.5)


PARTS = {"fits": fit_runs, "handles": control_run, "trials": run_trials}


def main() -> None:
    """Run these parts in turn, and read rows of Ray Data at the end, since it keeps its actors."""
    storage, *parts = sys.argv[1:]
    ray.init(num_cpus=NUM_CPUS, include_dashboard=False, namespace="mine")
    handler_before = signal.getsignal(signal.SIGTERM)
    observed: dict[str, Any] = {part: PARTS[part](storage) for part in parts}
    is_ray_kept = ray.is_initialized() and signal.getsignal(signal.SIGTERM) is handler_before
    observed |= {"ray_is_kept": is_ray_kept, "left": remaining_actors()}
    observed["data"] = read_ray_data(storage)
    print(json.dumps(observed, default=str))


if __name__ == "__main__":
    main()
