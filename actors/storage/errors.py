"""What can go wrong in a worker, by what must be done about it."""


class Interrupted(Exception):
    """The generation is being aborted: unwind, nothing is wrong here."""


class TornApply(RuntimeError):
    """An apply broke half-way: this worker's state is of no step."""


class LeaseLost(RuntimeError):
    """Somebody else drives the run now: nothing more may be written."""


class DamagedCheckpoint(Exception):
    """A file of a checkpoint is not what was written; the message names it."""


class DamagedLog(Exception):
    """A log cannot be read from a byte on; `reason` says what is wrong with the line there."""

    def __init__(self, url: str, offset: int, reason: str) -> None:
        super().__init__(f"{url} is damaged: the line at byte {offset} {reason}")
        self.url = url
        self.offset = offset


class LostLease(Exception):
    """Files of a run's lease were removed: its epochs would begin anew."""


class BrokenDevice(RuntimeError):
    """The device of this worker does not compute any more."""


class UnfitMachine(Exception):
    """A worker cannot serve the run where it is: the message says what this machine lacks."""


class ControllerLost(RuntimeError):
    """The controller's process is gone, and with it the run, until it is resumed."""


class ControllerAway(RuntimeError):
    """The controller's process is gone, and Ray is about to start it again."""


class RunNotDriven(RuntimeError):
    """Nobody drives the run now: there is nobody to ask."""


class RunRefused(RuntimeError):
    """No controller can take the run as it lies in storage; the message says why."""


class ClusterNotJoined(ConnectionError):
    """Something answers at the address of a Ray cluster, but Ray cannot join it."""


class ClusterNotStarted(RuntimeError):
    """A private Ray cluster could not be started on this machine."""


class RunTaken(RunRefused):
    """The run is being driven by somebody else."""


class WrongHolding(Exception):
    """A plan, a checkpoint or a vote counts on this worker's part of the state at a step that it
    does not stand at."""
