"""Settings of fault tolerance: checkpoints, snapshots, failure detection, growth and checks."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from elastic.geometry.errors import ElasticError
from elastic.reshard.parity import num_chunks_of
from elastic.reshard.snapshot_interval import AUTO_EVERY
from pipelines.errors import UserError
from pipelines.settings.bounds import (
    FunctionName,
    HealthFactor,
    Minutes,
    NonNegativeInt,
    PositiveInt,
    Seconds,
    Share,
    SpikeFactor,
    StragglerFactor,
    TimeFactor,
)
from pipelines.settings.setting import Settings, setting


class CheckpointSettings(Settings):
    """Durable copies of the state in storage; see docs/checkpoints.md."""

    every: NonNegativeInt | Minutes | Literal["auto"] = setting(
        "auto",
        "The interval: a number of steps, a time such as `15min`, or 0 to save the last step only. "
        "With `auto` it follows the measured cost of a checkpoint and the observed failure rate, "
        "between 1 and 15 minutes. Unless it is 0, a notice that a node will end requests a "
        "checkpoint at once.",
    )
    keep_last: NonNegativeInt = setting(3, "The number of newest checkpoints to keep; 0: all.")
    keep_every: NonNegativeInt = setting(
        0, "Checkpoints of multiples of this many steps are kept too; 0: none for this reason."
    )
    keep_best: NonNegativeInt = setting(
        1, "The number of checkpoints with the lowest held-out loss to keep as well."
    )
    save_timeout_s: Seconds = setting(
        300.0,
        "How long the last checkpoint may take, all attempts included, and how long a part may "
        "take before it counts as late; four times the longest recent write if that is more.",
    )
    save_backoff_s: Seconds = setting(
        5.0,
        "The pause after a failed write. It doubles with each failure, up to five minutes, or up "
        "to ten seconds between attempts of the last checkpoint.",
    )

    @property
    def every_steps(self) -> int:
        """Steps between two checkpoints; 0 if checkpoints are timed, or disabled."""
        return self.every if isinstance(self.every, int) else 0

    @property
    def every_s(self) -> float:
        """Seconds between two checkpoints; 0 if they are counted in steps, `auto`, or disabled."""
        if isinstance(self.every, int) or self.every == "auto":
            return 0.0
        return 60.0 * float(self.every.removesuffix("min"))


class SnapshotSettings(Settings):
    """Copies of the state in host memory; see docs/snapshots.md."""

    every: NonNegativeInt | Literal["auto"] = setting(
        1,
        "At each multiple of this many steps a worker copies state that no other worker holds to "
        "a snapshot server in host memory; 0: never. It is doubled, with a warning, while a copy "
        "takes longer. With `auto` the number is the least power of two, up to 1024, for which "
        "this is measured to add at most 1 % to the training time.",
    )
    redundancy: str = setting(
        "copy",
        "How state that only one node holds is also stored on other nodes: `copy`, or `xor:k` for "
        "its parity with the state of k other nodes, which takes a k-th of the memory.",
    )
    server_timeout_s: Seconds = setting(
        10.0, "How long a snapshot server has to report what it holds."
    )

    @property
    def every_steps(self) -> int:
        """Steps between two snapshots; 0: none; `AUTO_EVERY` for `auto`."""
        return AUTO_EVERY if self.every == "auto" else self.every

    @field_validator("redundancy")
    @classmethod
    def redundancy_is_known(cls, redundancy: str) -> str:
        try:
            num_chunks_of(redundancy)
        except ElasticError as error:
            raise UserError(str(error)) from None
        return redundancy


class GrowthSettings(Settings):
    """Waiting for workers, adding them and releasing them; see docs/cluster.md."""

    start_timeout_s: Seconds = setting(
        60.0,
        "A run starts with all its workers, or after this time with at least the minimum. While "
        "less than half are ready and others keep arriving, it waits up to twice as long.",
    )
    horizon_s: Seconds = setting(
        600.0,
        "A run pauses to add workers if they gain more than the pause costs within this time.",
    )
    standby_timeout_s: Seconds = setting(
        600.0, "Standby workers that have been of no use for this long are released."
    )
    gang_timeout_s: Seconds = setting(
        1800.0,
        "If fewer workers than the minimum have joined and no other joins for this long, all "
        "workers are released (gang back-off).",
    )


class FailureSettings(Settings):
    """Detection of failures and time limits of a recovery; see docs/how-it-works.md."""

    silence_timeout_s: Seconds = setting(
        5.0,
        "A worker whose process runs but answers no probe for this long, or for a median step if "
        "that is longer, is suspected. Raise this if a C call holds the GIL for longer. A stopped "
        "process is detected in 2.5 s.",
    )
    hang_timeout_s: Seconds = setting(
        60.0,
        "A worker hangs if it makes no progress for this long, or for `hang_factor` median steps "
        "if that is longer.",
    )
    hang_factor: TimeFactor = setting(10.0, "See `hang_timeout_s`.")
    hang_share: Share = setting(
        0.25,
        "If one worker has not unwound after a hang, it is killed this share of `hang_timeout_s` "
        "after the previous worker unwound. If several have not, one is killed each time that none "
        "unwinds for a hang timeout.",
    )
    first_step_timeout_s: Seconds = setting(
        600.0, "The hang timeout before any step has committed: the first step may compile."
    )
    quiesce_deadline_s: Seconds = setting(
        1.0,
        "After an abort, a worker that answers no probe gets at least this time to unwind before "
        "it is killed. After a hang, so does a run's only worker.",
    )
    quiesce_deadline_cuda_s: Seconds = setting(
        10.0, "The same as `quiesce_deadline_s` for a worker on a GPU."
    )
    quiesce_factor: TimeFactor = setting(
        4.0,
        "Such a worker gets at least this many median steps, and this many times what the last "
        "survivor took to unwind.",
    )
    collective_timeout_s: Seconds = setting(
        300.0,
        "The timeout of every collective. Any other worker gets this time to unwind or to roll "
        "forward.",
    )
    form_timeout_s: Seconds = setting(
        30.0,
        "The shortest time to form process groups; the next two settings may raise it. A "
        "generation that takes longer is aborted.",
    )
    form_timeout_per_worker_s: Seconds = setting(
        0.1, "Forming gets at least this long for each worker that takes part."
    )
    form_factor: TimeFactor = setting(
        3.0,
        "Forming gets at least this many times the slowest of the last four formings, late ones "
        "included, up to `failure.collective_timeout_s`.",
    )
    reshard_timeout_s: Seconds = setting(
        600.0,
        "How long moving or reading the state may take. A generation that takes longer is aborted. "
        "A run grows in rounds if a member would need more than half of it to send its state.",
    )
    max_attempts: PositiveInt = setting(
        8, "The run fails after this many recoveries without a committed step."
    )
    records_timeout_s: Seconds = setting(
        10.0,
        "A restarted controller requests the records of missed steps from one worker, and after "
        "this time from another.",
    )
    driver_timeout_s: Seconds = setting(
        60.0,
        "A run without `--detach` is saved and ends when its driver has been silent for this long.",
    )
    orphan_timeout_s: Seconds = setting(
        300.0,
        "A worker, snapshot server, store, agent or observer that hears nothing from a controller "
        "for this long ends its own process. A controller restart takes less time.",
    )


class LossMonitorSettings(Settings):
    """Detection of non-finite numbers and of loss spikes; see docs/step.md."""

    max_skipped: NonNegativeInt = setting(
        20,
        "A step with a non-finite loss or gradient is skipped; the run fails after this many "
        "skipped steps in a row; 0: no limit.",
    )
    spike_factor: SpikeFactor = setting(
        0.0,
        "A loss over this many times the median of the latest losses rolls the run back to before "
        "it, and the run skips the batches from there on; 0: off.",
    )
    spike_window: PositiveInt = setting(
        32, "The number of latest losses in this median; half of them suffice."
    )


class AuditSettings(Settings):
    """Comparison of the replicas bit by bit; see docs/step.md."""

    every: NonNegativeInt = setting(
        0, "Replicas are compared after each multiple of this many steps; 0: never."
    )
    rollback: bool = setting(
        False,
        "Whether the run rolls back to the last clean audit even if a majority identifies the "
        "replica that differs.",
    )


class StragglerSettings(Settings):
    """Detection of slow workers; see docs/watching.md."""

    every: NonNegativeInt = setting(
        20, "Workers report their compute time at each multiple of this many steps; 0: never."
    )
    factor: StragglerFactor = setting(
        2.0,
        "A worker is a straggler if it takes over this many times the median of others with the "
        "same work.",
    )
    reports: PositiveInt = setting(
        3,
        "A straggler is replaced by a standby worker, or else reported, after this many reports in "
        "a row.",
    )
    reduce: bool = setting(
        True,
        "Whether a straggler that no standby worker can replace computes fewer microbatches, and "
        "the others more. The losses do not depend on it.",
    )


class HealthSettings(Settings):
    """Checks of a machine before its worker joins, and of its GPU later; see docs/watching.md."""

    check: FunctionName | None = setting(
        None,
        "A function as `module:function` that each new worker calls with its device before it "
        "joins. It returns None, or says why no worker may run on this machine.",
    )
    slow_factor: HealthFactor = setting(
        4.0,
        "A new worker is refused if a matrix product takes over this many times as long as on the "
        "others' devices of the same kind, or if its links are this many times slower; 0: never.",
    )
    device_errors: bool = setting(
        True,
        "Whether a GPU is refused for errors that NVML reports (uncorrectable ECC errors, row "
        "remapping, slowdown by the hardware), and its worker drained for new ones (and for Xids).",
    )


class QuarantineSettings(Settings):
    """Nodes on which workers crash again and again get no new workers; see docs/watching.md."""

    after_crashes: NonNegativeInt = setting(
        3, "A node is quarantined after this many worker crashes; 0: off."
    )
    crash_window_s: Seconds = setting(600.0, "Older crashes do not count.")
    duration_s: Seconds = setting(3600.0, "A quarantined node is used again after this time.")
    patience_s: Seconds = setting(
        30.0,
        "A quarantined node is used again when the run has lacked workers for this long and no "
        "other node provides any. The wait is at least twice the start time of a worker, "
        "and doubles with each quarantine of the same node.",
    )
