"""Policy: the numbers by which the core decides when; all in one place, none read from a clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """How many workers a run wants, and how long it waits for what."""

    min_workers: int = 1
    max_workers: int = 1
    start_timeout_s: float = 60.0
    """A run starts with all its workers, or after this long with at least the minimum."""
    quiesce_deadline_s: float = 1.0
    """After an abort, a worker that does not answer probes gets at least this long to unwind; so
    does a run's only worker after a hang. Any other worker gets `collective_timeout_s`, except that
    a hang ends one at a time: see `hang_share`."""
    quiesce_deadline_cuda_s: float = 10.0
    """The same for a worker on a GPU."""
    quiesce_factor: float = 4.0
    """It also gets so many median steps, and so many times as long as the last survivor to unwind
    took."""
    collective_timeout_s: float = 300.0
    """What every process group has; also the patience with workers that unwind or roll forward."""
    records_timeout_s: float = 10.0
    """A worker that is asked for records of steps gets this long before another is asked."""
    form_timeout_s: float = 30.0
    """Process groups are formed within this time, or longer by the next two numbers; if not, the
    generation is aborted."""
    form_factor: float = 3.0
    """Forming gets so many times what the slowest of the last four took, late ones included."""
    form_timeout_per_worker_s: float = 0.1
    """Forming gets at least this long for each worker that takes part."""
    reshard_timeout_s: float = 600.0
    """How long moving, or reading, the state may take."""
    hang_timeout_s: float = 60.0
    hang_factor: float = 10.0
    """No progress for `max(hang_timeout_s, hang_factor x median step)` is a hang."""
    hang_share: float = 0.25
    """After a hang, the last worker that has not unwound is ended so large a share of
    `hang_timeout_s` after the one before it unwound. While there are several, one is ended each
    time that no other has unwound for as long as a hang takes to be noticed."""
    silence_timeout_s: float = 5.0
    """A worker that answers no probe for so long, or for a median step if that is longer, is
    suspected although its process runs. One that is stopped is found in 2.5 s."""
    first_step_timeout_s: float = 600.0
    """The same before any step has committed: the first one may have to compile."""
    growth_settle_s: float = 2.0
    """How long a ready joiner waits for others that are still warming up."""
    growth_horizon_s: float = 600.0
    """A growth has to be worth its pause within this time; see `growing`."""
    standby_timeout_s: float = 600.0
    """Spares with which nothing has been gained for so long are given back."""
    gang_timeout_s: float = 1800.0
    """A run with fewer workers than the minimum gives them back if no other comes for so long."""
    gang_pause_s: float = 30.0
    """After how long it asks for workers again; it doubles, up to half an hour."""
    gang_jitter: float = 0.0
    """By what share of both times this run waits longer than others; from 0 to 1."""
    save_timeout_s: float = 300.0
    """How long the last checkpoint may take, with all its tries."""
    save_backoff_s: float = 5.0
    """The pause after a checkpoint could not be written; it doubles, up to five minutes, and up to
    ten seconds between the tries of the last one."""
    checkpoint_every_s: float = 0.0
    """A checkpoint by time, beside those by steps; 0 is never."""
    checkpoint_auto: bool = False
    """Whether the time between checkpoints follows their measured cost and the failures observed,
    within the next two numbers; then a notice that a node will be gone orders one at once."""
    checkpoint_least_s: float = 60.0
    checkpoint_most_s: float = 900.0
    keep_last: int = 0
    """So many newest checkpoints are kept; 0 keeps all."""
    keep_every: int = 0
    """Those of each multiple of so many steps are kept as well; 0 is none for that reason."""
    keep_best: int = 0
    """So many with the lowest held-out loss are kept as well."""
    snapshot_every: int = 0
    """A snapshot is due at each multiple of so many steps, where one is needed; 0 is never."""
    snapshot_redundancy: str = "copy"
    """How what a node has alone is kept elsewhere: `copy`, or `xor:k` for the parity of k others,
    at 1/k of the memory."""
    snapshot_server_timeout_s: float = 10.0
    """How long the keepers get to say what they have."""
    snapshot_server_grace_s: float = 0.5
    """The same where the others have a state no older than snapshots promise: a silent keeper may
    be gone with its machine."""
    max_skipped: int = 20
    """So many steps in a row that were skipped, since a number was not finite: the run has failed;
    0 is never."""
    spike_factor: float = 0.0
    """A loss over so many times the median of the latest takes the run back; 0 is never."""
    spike_window: int = 32
    """Of so many latest losses; judged once there is half of them."""
    audit_every: int = 0
    """Replicas are compared after each multiple of so many steps; 0 is never."""
    audit_rollback: bool = False
    """Whether to go back also where a majority of the replicas names the one that differs."""
    max_rollbacks: int = 3
    """So many times the run goes back without having come `spike_window` steps further."""
    max_attempts: int = 8
    """So many recoveries without a committed step in between, and the run has failed."""
    max_start_failures: int = 5
    """So many workers that died while warming up, none of them ever ready: failed."""
    restart_backoff_s: float = 1.0
    """The pause after a worker died while warming up; it doubles, up to a minute."""
    straggler_every: int = 0
    """Members tell how long they computed at each multiple of so many steps; 0 is never."""
    straggler_factor: float = 2.0
    """Over so many times the median of the others that do the same work is a straggler."""
    straggler_reports: int = 3
    """After so many such reports in a row it is replaced, or told of."""
    quarantine_after: int = 3
    """A node on which workers have crashed so often is avoided; 0 is never."""
    crash_window_s: float = 600.0
    """Crashes that are older do not count."""
    quarantine_s: float = 3600.0
    """After so long an avoided node is used again."""
    quarantine_patience_s: float = 30.0
    """The same where the run lacks workers and none come elsewhere; at least twice as long as a
    worker takes to start, doubled with each quarantine of the same node."""
    drain_grace_s: float = 60.0
    """A node that is still there so long after its announced end is used again."""


MAX_DOUBLINGS = 16


def backoff_s(first_s: float, num_failures: int, longest_s: float) -> float:
    """In seconds: `first_s` after the first, doubled after each other, up to `longest_s`."""
    return min(first_s * 2.0 ** min(num_failures - 1, MAX_DOUBLINGS), longest_s)
