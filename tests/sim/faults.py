"""Faults of simulated workers, and when they strike: the n-th time that a worker passes a
moment."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

MOMENTS = (
    ("starting", 6),
    ("ready", 6),
    ("forming", 8),
    ("formed", 8),
    ("resharding", 8),
    ("resharded", 8),
    ("compute", 40),
    ("vote", 40),
    ("read", 40),
    ("apply", 40),
    ("applied", 40),
    ("reported", 40),
    ("writing", 12),
    ("saving", 3),
    ("paused", 5),
    ("quiescing", 4),
    ("rolling_forward", 2),
    ("rolled_forward", 2),
)
"""Each moment of a worker's life, and about how often it is passed in a run."""

ACTIONS = {
    "kill": 30,
    "kill two": 8,
    "kill and report late": 6,
    "freeze": 6,
    "freeze for a while": 5,
    "hang": 5,
    "lose a report": 10,
    "delay a report": 8,
    "delay an order": 5,
    "go deaf": 5,
    "raise peer": 3,
    "raise device": 3,
    "raise memory": 1,
    "raise program": 1,
    "suspect": 3,
    "drain a worker": 6,
    "drain": 4,
    "lose the store": 3,
    "fill the disk": 3,
    "flap": 3,
    "stop": 3,
    "restart": 4,
}
"""The faults, with their relative frequencies."""


@dataclass
class Fault:
    """Strikes the worker that passes `moment` after `num_spared` others have."""

    action: str
    moment: str
    num_spared: int = 0
    only_world_rank_0: bool = False

    def is_due(self, moment: str, world_rank: int | None) -> bool:
        """Whether it strikes this passage; counts the passages without a fault."""
        if moment != self.moment or (self.only_world_rank_0 and world_rank != 0):
            return False
        self.num_spared -= 1
        return self.num_spared < 0


NUMBERS = {
    "nan": 4,
    "nans": 1,
    "spike": 4,
    "falsify a checksum": 3,
}
"""Faults of the numbers that a worker reports, with their relative frequencies."""

HARMFUL = {
    "nans",
    "falsify a checksum",
    "raise peer",
    "raise device",
    "raise memory",
    "raise program",
    "lose a report",
    "delay a report",
    "fill the disk",
    "stop",
}
"""Without any of these, and with fewer than a storm of others, a run completes."""

STALLS = {"freeze", "hang", "hang the write"}
"""If a stalled worker alone holds its part of the state, the last checkpoint cannot be written."""

DELAYS = {"delay an order", "delay a report"}
LONGEST_DELAY_S = 8.0
"""If `save_timeout_s` is shorter, a delayed message alone makes the last checkpoint too late."""
LATE_DEATHS = {"kill and report late"}
LATEST_REPORT_S = 3.0
"""The same for a death that is reported this late: until then its part is waited for."""

RESTARTS = {"restart", "restart the controller", "take the lease"}
"""After these another controller reads what the one before it has written."""

STORM = 12


def draw_faults(random: Random) -> list[Fault]:
    """None to five faults, and sometimes a storm."""
    number = random.choice((0, 1, 1, 2, 2, 2, 3, 3, 4, 5, STORM))
    actions = random.choices(list(ACTIONS), list(ACTIONS.values()), k=number)
    return [_draw_fault(random, action) for action in actions]


LAYOUTS = (
    "",
    "dp=1",
    "dp=2",
    "dp=3",
    "fsdp=2",
    "fsdp=3",
    "fsdp=4",
    "dp=2,fsdp=2",
    "tp=2",
    "pp=2",
    "dp=9",
)
"""Layouts that a user may request during a run; the last is never feasible."""


def draw_layout_requests(random: Random) -> list[Fault]:
    """One to four layout requests; the worker that passes the moment is not harmed."""
    layouts = random.choices(LAYOUTS, k=random.randint(1, 4))
    return [_draw_fault(random, f"request layout {layout}") for layout in layouts]


def draw_bad_numbers(random: Random) -> list[Fault]:
    """One to four workers report wrong numbers during training."""
    actions = random.choices(list(NUMBERS), list(NUMBERS.values()), k=random.randint(1, 4))
    moments = ("compute", "vote")
    return [Fault(a, random.choice(moments), random.randrange(60)) for a in actions]


def draw_node_faults(random: Random) -> list[Fault]:
    """Up to three nodes or snapshot servers end without notice."""
    actions = random.choices(("kill the node", "kill the snapshot server"), k=random.randint(0, 3))
    return [_draw_fault(random, action) for action in actions]


def draw_frozen_snapshot_servers(random: Random) -> list[Fault]:
    """One to three snapshot servers freeze, some for a while."""
    actions = ("freeze the snapshot server", "freeze the snapshot server for a while")
    return [_draw_fault(random, a) for a in random.choices(actions, k=random.randint(1, 3))]


def draw_drains(random: Random) -> list[Fault]:
    """One to three nodes announce their end; some do not end."""
    actions = ("drain soon", "drain soon", "drain", "drain in vain")
    return [_draw_fault(random, a) for a in random.choices(actions, k=random.randint(1, 3))]


def draw_long_notices(random: Random) -> list[Fault]:
    """One or two nodes announce their end long before."""
    return [_draw_fault(random, "drain late") for _ in range(random.randint(1, 2))]


def draw_storage_faults(random: Random) -> list[Fault]:
    """One to five faults of the storage, and restarts that read from it."""
    actions = ("damage a checkpoint", "fill the disk", "fill the disk", "kill two", "restart")
    return [_draw_fault(random, a) for a in random.choices(actions, k=random.randint(1, 5))]


def draw_hung_writes(random: Random) -> list[Fault]:
    """One to three writes of parts never return."""
    number = random.choice((1, 1, 2, 3))
    return [Fault("hang the write", "writing", random.randrange(12)) for _ in range(number)]


def draw_slow_workers(random: Random) -> list[Fault]:
    """One to four workers turn slow during training."""
    moments = ("compute", "vote", "applied")
    number = random.randint(1, 4)
    return [Fault("slow", random.choice(moments), random.randrange(60)) for _ in range(number)]


def draw_broken_nodes(random: Random, number: int) -> list[Fault]:
    """On this many nodes workers die from now on as they start, or soon after."""
    return [_draw_fault(random, "break the node") for _ in range(number)]


def draw_controller_restarts(random: Random) -> list[Fault]:
    """The controller dies one to four times."""
    number = random.randint(1, 4)
    return [_draw_fault(random, "restart the controller") for _ in range(number)]


def draw_shell_faults(random: Random) -> list[Fault]:
    """One to three exceptions in the controller, outages of its logs, or losses of its lease."""
    actions = ("raise in the core", "raise in a command", "refuse the logs", "take the lease")
    weights = (3, 3, 2, 1)
    return [
        _draw_fault(random, a) for a in random.choices(actions, weights, k=random.randint(1, 3))
    ]


def draw_long_absence(random: Random, num_steps: int) -> list[Fault]:
    """The controller dies early, for about this many steps. While it is away or later, some workers
    die, usually world rank 0 among them."""
    away = Fault("restart the controller", "applied", random.randint(1, 20), only_world_rank_0=True)
    faults = [away]
    for _ in range(random.choice((0, 1, 1, 2))):
        action = random.choice(("kill", "kill", "kill two", "lose a report", "raise peer"))
        moment = random.choice(("compute", "vote", "read", "apply", "applied", "reported"))
        num_spared = random.randint(0, num_steps + 40)
        faults.append(Fault(action, moment, num_spared, random.random() < 0.7))
    return faults


def _draw_fault(random: Random, action: str) -> Fault:
    moment, num_passages = random.choice(MOMENTS)
    only_world_rank_0 = random.random() < 0.25
    return Fault(action, moment, random.randrange(num_passages), only_world_rank_0)
