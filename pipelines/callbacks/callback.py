"""The base class of callbacks, whose methods do nothing."""

from __future__ import annotations

from pipelines.callbacks.records import (
    CommittedStep,
    CompletedReshard,
    EndedRun,
    HeldOutResult,
    ReceivedNotice,
    SavedCheckpoint,
    StartedRun,
)


class Callback:
    """Override what you need. All methods are called one after the other, on one thread of the
    process that launched the run.

    They read the files of the run, so workers and controller never wait for them. A method that is
    slower than the training is called later; at the end of the run the launching process waits for
    the remaining calls. If a method raises, the run continues without this callback.
    """

    def on_start(self, run: StartedRun) -> None:
        """The first workers are about to train; a resumed run continues after `run.step`."""

    def on_step(self, step: CommittedStep) -> None:
        """A step has committed. Each step comes once and in order, whatever workers or controllers
        die. After a rollback the steps behind it are computed and come again."""

    def on_evaluation(self, evaluation: HeldOutResult) -> None:
        """The held-out samples were evaluated after a step."""

    def on_reshard(self, reshard: CompletedReshard) -> None:
        """Other workers, or the same under another layout, continue with the state in place."""

    def on_notice(self, notice: ReceivedNotice) -> None:
        """A worker or a node will end soon: a spot notice, a drain, or a device with errors."""

    def on_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        """A checkpoint is complete and visible."""

    def on_end(self, result: EndedRun) -> None:
        """The run has ended, for any reason; nothing is called afterwards."""
