"""`TensorBoardCallback`: the steps and events of a run as TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path
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
from pipelines.observe.history.formatting import counted

FLUSH_EVERY_S = 10


class TensorBoardCallback(Callback):
    """Writes the numbers of each step and evaluation, and texts about reshards, notices and
    checkpoints, for `tensorboard --logdir FOLDER`.

    `folder` gets a folder of the run's name. By default it is `tensorboard` in the run's folder, or
    for a run at a URL `tensorboard/RUN` in the working folder. Steps that a rollback undoes
    disappear. Raises `UserError` without the package `tensorboard`.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        import_package("torch.utils.tensorboard", "tensorboard", type(self).__name__)
        self._folder = folder
        self._place = ""
        self._step = 0
        self._writer: Any = None

    def on_start(self, run: StartedRun) -> None:
        if self._folder is not None:
            self._place = str(Path(self._folder) / run.name)
        elif "://" in run.folder:
            self._place = str(Path("tensorboard") / run.name)
        else:
            self._place = str(Path(run.folder) / "tensorboard")
        self._begin_after(run.step)

    def on_step(self, step: CommittedStep) -> None:
        if step.number <= self._step:  # after a rollback
            self._begin_after(step.number - 1)
        self._step = step.number
        for name, value in scalars_of(step).items():
            self._writer.add_scalar(name, value, step.number, walltime=step.time)

    def on_evaluation(self, evaluation: HeldOutResult) -> None:
        values = {"loss": evaluation.loss, **evaluation.metrics}
        for name, value in values.items():
            if value is not None:
                place = f"held_out/{name}"
                self._writer.add_scalar(place, value, evaluation.step, walltime=evaluation.time)

    def on_reshard(self, reshard: CompletedReshard) -> None:
        workers = counted(len(reshard.workers), "worker")
        text = f"generation {reshard.generation}: {workers} ({reshard.layout})"
        self._write_text("reshards", text, reshard.step, reshard.time)

    def on_notice(self, notice: ReceivedNotice) -> None:
        subject = ", ".join(notice.workers) or notice.node
        self._write_text(
            "notices", f"{notice.kind}: {subject}: {notice.cause}", self._step, notice.time
        )

    def on_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        self._write_text("checkpoints", checkpoint.path, checkpoint.step, checkpoint.time)

    def on_end(self, result: EndedRun) -> None:
        self._writer.close()
        self._writer = None

    def _begin_after(self, step: int) -> None:
        """Begin a file that undoes what earlier files have of later steps."""
        if self._writer is not None:
            self._writer.close()
        module = import_package("torch.utils.tensorboard", "tensorboard", type(self).__name__)
        self._step = step
        self._writer = module.SummaryWriter(
            self._place, purge_step=step + 1, flush_secs=FLUSH_EVERY_S
        )

    def _write_text(self, name: str, text: str, step: int, time: float) -> None:
        self._writer.add_text(f"events/{name}", text, step, walltime=time)
