"""Exceptions of `actors`, one for each reaction that they call for."""


class Interrupted(Exception):
    """The generation is being aborted: unwind. This worker is healthy."""


class TornApply(RuntimeError):
    """An apply failed half-way: this worker's state belongs to no step."""


class FileChanged(OSError):
    """A file is another than the one that was listed, which no retry fixes."""


class LeaseLost(RuntimeError):
    """Another process drives the run now: this one must not write any more."""


class DamagedCheckpoint(Exception):
    """A file of a checkpoint is missing or damaged; the message names the file."""


class DamagedLog(Exception):
    """A log cannot be read beyond byte `offset`; `reason` completes "the line at byte N ..."."""

    def __init__(self, url: str, offset: int, reason: str) -> None:
        super().__init__(f"{url} is damaged: the line at byte {offset} {reason}")
        self.url = url
        self.offset = offset


class LeaseFilesMissing(Exception):
    """Files of a run's lease were removed: epochs would be reused."""


class BrokenDevice(RuntimeError):
    """The device of this worker no longer computes."""


class UnsuitableMachine(Exception):
    """This machine cannot host a worker; the message says what it lacks."""


class UnhealthyMachine(UnsuitableMachine):
    """A check of this machine failed before its worker joined."""


class ProgramRefused(Exception):
    """The user's program breaks a rule of the run; the message is one line about the mistake."""


class ControllerLost(RuntimeError):
    """The controller process is gone for good: the run stops until it is resumed."""


class ControllerRestarting(RuntimeError):
    """The controller process is gone, and Ray is about to restart it."""


class RunNotDriven(RuntimeError):
    """No controller drives the run now, so none can answer."""


class RunRefused(RuntimeError):
    """No controller can open the run from storage; the message says why."""


class ClusterNotJoined(ConnectionError):
    """A process answers at the address of a Ray cluster, but Ray cannot join it."""


class ClusterNotStarted(RuntimeError):
    """A private Ray cluster could not be started on this machine."""


class RunTaken(RunRefused):
    """Another process drives the run."""


class StepMismatch(Exception):
    """A plan, a checkpoint or a vote expects this worker's state at another step than it has."""
