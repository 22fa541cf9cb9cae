"""`ElasticTrainer`: elastic training with the interface of Ray Train."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ray.train import Result, RunConfig, ScalingConfig
from rich.console import Console

from actors.ray_backend.tune_trial import trainable_of
from pipelines.api.configs import RunOptions, Scaling, changes_of
from pipelines.api.live_run import LiveRun
from pipelines.api.result import ended, in_terms_of_python
from pipelines.api.trial import StepReports
from pipelines.callbacks.callback_thread import called_back
from pipelines.callbacks.loading import CallbackLike
from pipelines.errors import UserError
from pipelines.run.drive import (
    Interrupts,
    follow,
    plan_on_this_machine,
    print_location,
    started_run,
)
from pipelines.run.plan import RunPlan, TrainRequest
from pipelines.run.recipes import RecipeLike, load, name_of


class ElasticTrainer:
    """Trains a recipe on workers that may join and leave during the run.

    `recipe` is a name, `file.py:function`, `TrainSettings`, a `Recipe` of a custom model, a
    function that returns one of these, or a custom training loop. A function gets the arguments
    of `recipe_config` by name.
    `scaling_config` sets the number of workers, `(2, 8)` for any number from 2 to 8, and the
    resources of each; `run_config` sets the run name, which also resumes a run, and the storage.
    `layout` is the target layout for all workers, such as `dp=2,fsdp=2`; `steps` is the last step;
    `set` overrides settings, such as `{"optimizer.lr": 1e-3}`. `callbacks` are called in this
    process for each step and event, see `pipelines.callbacks`. `verbose=0` prints nothing. The
    other arguments are options of `elastic train`.

    Raises `UserError` for unsupported arguments.
    """

    def __init__(
        self,
        recipe: RecipeLike,
        *,
        recipe_config: Mapping[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        layout: str | None = None,
        steps: int | None = None,
        data: str | None = None,
        set: Mapping[str, Any] | None = None,
        audit_every: int | None = None,
        inject: Sequence[str] = (),
        record_samples: bool = False,
        tracking_uri: str | None = None,
        experiment: str = "elastic",
        interface: str | None = None,
        ports: str | None = None,
        notify: str | None = None,
        callbacks: Sequence[CallbackLike] = (),
        verbose: int = 1,
    ) -> None:
        scaling, options = Scaling.of(scaling_config), RunOptions.of(run_config)
        self._verbose = verbose
        self._request = TrainRequest(
            recipe=recipe,
            arguments=dict(recipe_config or {}),
            run_name=options.name,
            storage=options.storage,
            workers=scaling.workers,
            per_worker=scaling.per_worker,
            layout=layout,
            steps=steps,
            data=data,
            changes=(*scaling.changes, *options.changes, *changes_of(set or {})),
            audit_every=audit_every,
            inject=tuple(inject),
            record_samples=record_samples,
            tracking_uri=tracking_uri,
            experiment=experiment,
            interface=interface,
            ports=ports,
            notify=notify,
            callbacks=tuple(callbacks),
        )

    def fit(self) -> Result:
        """Train to the end; an existing run of this name is resumed.

        The first SIGINT or SIGTERM saves and ends the run, and is then raised as
        `KeyboardInterrupt` or `SystemExit`; only the main thread handles signals. Raises
        `UserError` for a refused request, `TrainingFailedError` with the traceback of the user's
        code.
        """
        with in_terms_of_python():
            plan = plan_on_this_machine(self._request)
            console = Console() if self._verbose else None
            interrupts = Interrupts()

            def joined() -> None:
                interrupts.install()
                if console:
                    print_location(plan, console)

            try:
                with called_back(plan.folder, plan.callbacks, plan.recipe) as calls:
                    with started_run(plan, joined=joined) as drive_:
                        calls.start()
                        progress = follow(plan, drive_, console, lambda: interrupts.forward(drive_))
                    calls.outcome = progress.outcome
            finally:
                interrupts.restore()
        if interrupts.number == signal.SIGINT:
            raise KeyboardInterrupt
        if interrupts.number:
            raise SystemExit(128 + interrupts.number)
        return ended(plan.folder, progress, calls.failures)

    def start(self) -> LiveRun:
        """Start or resume the run and return at once. Raises `UserError` for a refused request."""
        return LiveRun(self._plan())

    def as_trainable(self, report_every: int = 1) -> Any:
        """A trainable for `ray.tune.Tuner`: each trial is a run with the trial's name.

        The parameter space overrides settings, as `set` does; its key `recipe_config` overrides
        arguments of the recipe's function. Every `report_every`-th step is reported. When a
        scheduler ends the trial, the run saves and ends. Raises `UserError` for an unknown recipe.
        """
        if report_every < 1:
            raise UserError(f"report_every={report_every}: use 1 or more")
        with in_terms_of_python():
            load(self._request.recipe, self._request.arguments)
        script_folder = os.getcwd()

        def begin(trial_name: str, config: dict[str, Any]) -> StepReports:
            with suppress(OSError):  # the folder may not exist on another machine
                os.chdir(script_folder)  # Tune changes the folder; paths are relative to the script
            return StepReports(self._plan(trial_name, config), report_every)

        return trainable_of(begin, name_of(self._request.recipe).rpartition(":")[2])

    def _plan(
        self, run_name: str | None = None, config: Mapping[str, Any] | None = None
    ) -> RunPlan:
        values = dict(config or {})
        arguments = {**self._request.arguments, **values.pop("recipe_config", {})}
        changes = (*self._request.changes, *changes_of(values))
        name = run_name or self._request.run_name
        request = replace(self._request, changes=changes, arguments=arguments, run_name=name)
        with in_terms_of_python():
            return plan_on_this_machine(request)
