"""`WandbCallback`: the steps and events of a run in Weights & Biases."""

from __future__ import annotations

import os
from hashlib import sha256
from typing import Any

from pipelines.callbacks.callback import Callback
from pipelines.callbacks.optional_package import import_package, scalars_of
from pipelines.callbacks.records import (
    CommittedStep,
    CompletedReshard,
    EndedRun,
    HeldOutResult,
    ReceivedNotice,
    SavedCheckpoint,
    StartedRun,
)
from pipelines.errors import UserError

PROJECT = "elastic"
WITHOUT_KEY = ("offline", "dryrun", "disabled")
"""Modes of wandb that need no login."""


class WandbCallback(Callback):
    """Logs the numbers of each step and evaluation over `step`, and the settings as configuration.

    `init` are arguments of `wandb.init`, such as `project` and `tags`. A resumed run continues its
    wandb run. Steps that a rollback undoes are logged again. Raises `UserError` without the package
    `wandb`, or if that is not logged in and not `offline`.
    """

    def __init__(self, **init: Any) -> None:
        wandb = import_package("wandb", "wandb", type(self).__name__)
        mode = init.get("mode") or os.environ.get("WANDB_MODE") or "online"
        if mode not in WITHOUT_KEY:
            try:
                wandb.login()  # it asks for a key here, and not in the middle of the run
            except wandb.Error as error:
                raise UserError(
                    f"WandbCallback: {' '.join(str(error).split())} Or set WANDB_MODE=offline"
                ) from None
        self._init = init
        self._run: Any = None
        self._num_reshards = 0
        self._num_notices = 0

    def on_start(self, run: StartedRun) -> None:
        wandb = import_package("wandb", "wandb", type(self).__name__)
        # The panel of the command is no output of the training.
        defaults = {
            "project": PROJECT,
            "name": run.name,
            "id": sha256(f"{run.folder} {run.began}".encode()).hexdigest()[:16],
            "resume": "allow",
            "config": {"recipe": run.recipe, **run.settings},
            "settings": wandb.Settings(console="off"),
        }
        self._num_reshards = self._num_notices = 0
        self._run = wandb.init(**{**defaults, **self._init})
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def on_step(self, step: CommittedStep) -> None:
        self._run.log({"step": step.number, **scalars_of(step)})

    def on_evaluation(self, evaluation: HeldOutResult) -> None:
        values = {"loss": evaluation.loss, **evaluation.metrics}
        known = {f"held_out/{name}": value for name, value in values.items() if value is not None}
        self._run.log({"step": evaluation.step, **known})

    def on_reshard(self, reshard: CompletedReshard) -> None:
        self._num_reshards += 1
        self._run.summary["num_reshards"] = self._num_reshards
        self._run.summary["layout"] = reshard.layout

    def on_notice(self, notice: ReceivedNotice) -> None:
        self._num_notices += 1
        self._run.summary["num_notices"] = self._num_notices

    def on_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        self._run.summary["checkpoint"] = checkpoint.path

    def on_end(self, result: EndedRun) -> None:
        self._run.summary["outcome"] = result.outcome
        self._run.finish(exit_code=0 if result.outcome in ("completed", "interrupted") else 1)
        self._run = None
