"""What befalls simulated workers, and when: the n-th time that anybody passes a moment."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

MOMENTS = (
    ("starting", 6),
    ("ready", 6),
    ("forming", 8),
    ("formed", 8),
    ("relaying", 8),
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
    ("settled", 2),
)
"""Each moment of a worker's life, and about how often one is passed in a run."""

ACTIONS = {
    "kill": 30,
    "kill two": 8,
    "kill and tell late": 6,
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
    "leave": 6,
    "drain": 4,
    "lose the store": 3,
    "fill the disk": 3,
    "flap": 3,
    "stop": 3,
    "restart": 4,
}
"""What may happen, and how often one against another."""


@dataclass
class Fault:
    """Done to the worker that passes `moment` after `num_spared` others have."""

    action: str
    moment: str
    num_spared: int = 0
    only_world_rank_0: bool = False

    def is_due(self, moment: str, world_rank: int | None) -> bool:
        """Whether it strikes this passage; counts those that it spares."""
        if moment != self.moment or (self.only_world_rank_0 and world_rank != 0):
            return False
        self.num_spared -= 1
        return self.num_spared < 0


NUMBERS = {
    "nan": 4,
    "nans": 1,
    "spike": 4,
    "lie": 3,
}
"""What may happen to the numbers that a worker tells, and how often one against another."""

HARMFUL = {
    "nans",
    "lie",
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

STANDSTILLS = {"freeze", "hang", "hang the write"}
"""Nobody can write the last checkpoint for a worker that alone has its part of the state."""

STORM = 12


def draw_faults(random: Random) -> list[Fault]:
    """None to five, and now and then a storm."""
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
"""What a person may wish for while a run goes on; the last can never be had."""


def draw_relayouts(random: Random) -> list[Fault]:
    """One to four wishes for another layout; whoever passes the moment is not harmed."""
    layouts = random.choices(LAYOUTS, k=random.randint(1, 4))
    return [_draw_fault(random, f"relayout {layout}") for layout in layouts]


def draw_bad_numbers(random: Random) -> list[Fault]:
    """One to four workers tell of something that is not so, in the midst of training."""
    actions = random.choices(list(NUMBERS), list(NUMBERS.values()), k=random.randint(1, 4))
    moments = ("compute", "vote")
    return [Fault(a, random.choice(moments), random.randrange(60)) for a in actions]


def draw_node_faults(random: Random) -> list[Fault]:
    """Up to three nodes or keepers end at once."""
    actions = random.choices(("kill the node", "kill the keeper"), k=random.randint(0, 3))
    return [_draw_fault(random, action) for action in actions]


def draw_frozen_keepers(random: Random) -> list[Fault]:
    """One to three keepers stand still, some for a while."""
    actions = ("freeze the keeper", "freeze the keeper for a while")
    return [_draw_fault(random, a) for a in random.choices(actions, k=random.randint(1, 3))]


def draw_drains(random: Random) -> list[Fault]:
    """One to three nodes announce their end; not all of them do end."""
    actions = ("drain soon", "drain soon", "drain", "drain in vain")
    return [_draw_fault(random, a) for a in random.choices(actions, k=random.randint(1, 3))]


def draw_long_notices(random: Random) -> list[Fault]:
    """One or two nodes announce their end in good time."""
    return [_draw_fault(random, "drain late") for _ in range(random.randint(1, 2))]


def draw_storage_faults(random: Random) -> list[Fault]:
    """One to five faults of the storage, and of those who would go back to it."""
    actions = ("damage a checkpoint", "fill the disk", "fill the disk", "kill two", "restart")
    return [_draw_fault(random, a) for a in random.choices(actions, k=random.randint(1, 5))]


def draw_hung_writes(random: Random) -> list[Fault]:
    """One to three writes of parts never return."""
    number = random.choice((1, 1, 2, 3))
    return [Fault("hang the write", "writing", random.randrange(12)) for _ in range(number)]


def draw_slow_workers(random: Random) -> list[Fault]:
    """One to four workers turn slow amid training."""
    moments = ("compute", "vote", "applied")
    number = random.randint(1, 4)
    return [Fault("slow", random.choice(moments), random.randrange(60)) for _ in range(number)]


def draw_spoilt_nodes(random: Random, number: int) -> list[Fault]:
    """On so many nodes workers die from now on as they start, or soon after."""
    return [_draw_fault(random, "spoil the node") for _ in range(number)]


def draw_controller_restarts(random: Random) -> list[Fault]:
    """The controller dies one to four times."""
    number = random.randint(1, 4)
    return [_draw_fault(random, "restart the controller") for _ in range(number)]


def draw_long_absence(random: Random, num_steps: int) -> list[Fault]:
    """The controller dies early, for about so many steps; then, while it is away or later, some
    workers die, mostly with world rank 0 among them."""
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
