"""Policy: the timeouts, limits and intervals by which the core decides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """The number of workers of a run, and all timeouts, limits and intervals of the core."""

    min_workers: int = 1
    max_workers: int = 1
    start_timeout_s: float = 60.0
    """A run starts with all its workers, or after this time with at least the minimum."""
    quiesce_deadline_s: float = 1.0
    """Least time to unwind after an abort, for a worker that does not answer probes and, after a
    hang, for a run's only worker. Any other worker gets `collective_timeout_s`, except that after a
    hang workers are ended one at a time: see `hang_share`."""
    quiesce_deadline_cuda_s: float = 10.0
    """The same for a worker on a GPU."""
    quiesce_factor: float = 4.0
    """Such a worker also gets this many median steps, and this many times the time that the latest
    survivor took to unwind."""
    collective_timeout_s: float = 300.0
    """The timeout of every process group; also the limit for workers to unwind or roll forward."""
    records_timeout_s: float = 10.0
    """How long a worker has to send requested step records before another worker is asked."""
    form_timeout_s: float = 30.0
    """Least time to form process groups; the next two settings may raise it. If forming takes
    longer, the generation is aborted."""
    form_factor: float = 3.0
    """Forming gets this many times the slowest of the last four formings, late ones included."""
    form_timeout_per_worker_s: float = 0.1
    """Forming gets at least this long for each worker that takes part."""
    reshard_timeout_s: float = 600.0
    """How long moving or reading the state may take."""
    hang_timeout_s: float = 60.0
    hang_factor: float = 10.0
    """No progress for `max(hang_timeout_s, hang_factor x median step)` is a hang."""
    hang_share: float = 0.25
    """After a hang, the last worker that has not unwound is ended this share of `hang_timeout_s`
    after the previous worker unwound. While several have not unwound, one is ended each time that
    none has unwound for as long as it takes to detect a hang."""
    silence_timeout_s: float = 5.0
    """A worker that answers no probe for this long, or for a median step if that is longer, is
    suspected even if its process runs. A stopped process is detected in 2.5 s."""
    first_step_timeout_s: float = 600.0
    """The hang timeout before any step has committed: the first step may have to compile."""
    growth_settle_s: float = 2.0
    """How long a ready worker waits for others that are still warming up."""
    growth_horizon_s: float = 600.0
    """A growth must recover the time of its pause within this time; see `growth`."""
    standby_timeout_s: float = 600.0
    """Standby workers that have been of no use for this long are given back."""
    gang_timeout_s: float = 1800.0
    """Gang back-off: below the minimum, the run gives its workers back if no other arrives for this
    long."""
    gang_pause_s: float = 30.0
    """After a gang back-off, the run requests workers again after this time; it doubles, up to half
    an hour."""
    gang_jitter: float = 0.0
    """The share of both times by which this run waits longer than others; from 0 to 1."""
    save_timeout_s: float = 300.0
    """How long the last checkpoint may take, all attempts included."""
    save_backoff_s: float = 5.0
    """The pause after a failed checkpoint; it doubles, up to five minutes, or up to ten seconds
    between attempts of the last checkpoint."""
    checkpoint_every_s: float = 0.0
    """A checkpoint is due after this time, besides those due by steps; 0: never."""
    checkpoint_auto: bool = False
    """Whether the time between checkpoints follows their measured cost and the observed failures,
    within the next two settings. If so, a notice that a node will be gone requests one at once."""
    checkpoint_least_s: float = 60.0
    checkpoint_most_s: float = 900.0
    keep_last: int = 0
    """The number of newest checkpoints to keep; 0: all."""
    keep_every: int = 0
    """Checkpoints of multiples of this many steps are kept too; 0: none for this reason."""
    keep_best: int = 0
    """The number of checkpoints with the lowest held-out loss to keep as well."""
    snapshot_every: int = 0
    """A snapshot is due at each multiple of this many steps, if one is needed; 0: never."""
    snapshot_redundancy: str = "copy"
    """How regions that only one node holds are stored on other nodes: `copy`, or `xor:k` for the
    parity of k others, at 1/k of the memory."""
    snapshot_server_timeout_s: float = 10.0
    """How long snapshot servers have to report what they hold."""
    snapshot_server_grace_s: float = 0.5
    """The same if the others hold a state as new as snapshots guarantee: a silent snapshot server
    may be gone with its machine."""
    max_skipped: int = 20
    """The run fails after this many consecutive steps skipped because a number was not finite; 0:
    never."""
    spike_factor: float = 0.0
    """A loss above this many times the median of the latest losses causes a rollback; 0: never."""
    spike_window: int = 32
    """The number of latest losses for this median; half of them suffice."""
    audit_every: int = 0
    """Replicas are compared after each multiple of this many steps; 0: never."""
    audit_rollback: bool = False
    """Whether to roll back even if a majority of replicas identifies the one that differs."""
    max_rollbacks: int = 3
    """The most rollbacks before the run has got `spike_window` steps further."""
    max_attempts: int = 8
    """The run fails after this many recoveries without a committed step in between."""
    max_start_failures: int = 5
    """The run fails if this many workers die while warming up and none was ever ready."""
    restart_backoff_s: float = 1.0
    """The pause after a worker died while warming up; it doubles, up to a minute."""
    straggler_every: int = 0
    """Members report their compute time at each multiple of this many steps; 0: never."""
    straggler_factor: float = 2.0
    """A member above this many times the median of others with the same work is a straggler."""
    straggler_reports: int = 3
    """A straggler is replaced, or a warning given, after this many consecutive reports."""
    quarantine_after: int = 3
    """A node is quarantined after this many crashes of workers; 0: never."""
    crash_window_s: float = 600.0
    """Older crashes do not count."""
    quarantine_s: float = 3600.0
    """A quarantined node is used again after this time."""
    quarantine_patience_s: float = 30.0
    """The same if the run lacks workers and no other node provides any. At least twice the start
    time of a worker; it doubles with each quarantine of the same node."""
    drain_grace_s: float = 60.0
    """A node that still exists this long after its announced end is used again."""


MAX_DOUBLINGS = 16


def backoff_s(first_s: float, num_failures: int, longest_s: float) -> float:
    """The pause after a number of failures: `first_s`, doubled for each further failure, at most
    `longest_s`."""
    return min(first_s * 2.0 ** min(num_failures - 1, MAX_DOUBLINGS), longest_s)
