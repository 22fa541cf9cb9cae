"""Generated traces of availability, from settings and a seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from elastic.simulation.trace import ADD, REMOVE, Availability, NodeChange, availability
from pipelines.errors import UserError
from pipelines.settings.setting import Settings, setting
from pipelines.simulation.settings import group_of, parse_pair

HOUR_S = 3600.0
Probability = Annotated[float, Field(ge=0, le=1)]


class TraceSettings(Settings):
    """How nodes come and go in a generated trace."""

    nodes: PositiveInt = setting(8, "The number of nodes at the start, and the most at any time.")
    hours: PositiveFloat = setting(24.0, "The length of the trace.")
    mtbf_h: PositiveFloat = setting(
        24.0, "Mean hours until a node is lost; the times are exponentially distributed."
    )
    replace_s: NonNegativeFloat = setting(
        300.0, "Seconds until another node replaces a lost one: the start delay of the cloud."
    )
    rack: PositiveInt = setting(1, "So many nodes in a row share a rack.")
    correlated: Probability = setting(
        0.0, "The probability that the loss of a node takes its whole rack."
    )
    capacity_least: NonNegativeInt = setting(
        0, "With `capacity_every_h`: the fewest nodes that the cloud offers."
    )
    capacity_every_h: NonNegativeFloat = setting(
        0.0, "Every so many hours the cloud offers another number of nodes; 0: always all."
    )
    notice_s: NonNegativeFloat = setting(0.0, "Seconds between the notice of a loss and the loss.")
    price: NonNegativeFloat = setting(0.0, "The price of a node-hour; 0: none.")
    price_spread: NonNegativeFloat = setting(
        0.0, "A new node costs up to this share less or more, e.g. 0.3 for 30 %."
    )
    seed: int = setting(0, "Equal settings and seeds give equal traces.")


def generate(text: str) -> Availability:
    """The trace of `nodes=64,mtbf_h=24,...`. Raises `UserError`."""
    values: dict[str, str] = {}
    for part in text.split(","):
        values |= parse_pair(part, "--generate", TraceSettings)
    settings = group_of(TraceSettings, values, "--generate")
    if settings.capacity_least > settings.nodes:
        raise UserError(
            f"--generate: capacity_least={settings.capacity_least} is above nodes={settings.nodes}"
        )
    return Generator(settings).trace()


class Generator:
    """Draws the times of losses, replacements and changes of capacity."""

    def __init__(self, settings: TraceSettings) -> None:
        self._settings = settings
        self._random = Random(settings.seed)
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = count()
        self._changes: list[NodeChange] = []
        self._there: dict[int, int] = {}
        """By place: how often a node has been added there; only places with a node."""
        self._num_added = [0] * settings.nodes
        self._capacity = settings.nodes
        self._num_owed = 0
        """Replacements that the capacity does not allow yet."""

    def trace(self) -> Availability:
        """Draw the whole trace."""
        settings = self._settings
        end_s = settings.hours * HOUR_S
        for _ in range(settings.nodes):
            self._add(0.0)
        if settings.capacity_every_h:
            self._after(settings.capacity_every_h * HOUR_S, self._change_capacity)
        while self._due and self._due[0][0] < end_s:
            now, _, act = heappop(self._due)
            act(now)
        whole = [c for c in self._changes if c.time_s < end_s]
        return availability(whole, end_s).with_notice(settings.notice_s)

    def _after(self, at_s: float, act: Callable[[float], None]) -> None:
        heappush(self._due, (at_s, next(self._count), act))

    def _add(self, now: float) -> None:
        """Add a node at the first free place, if the capacity allows it."""
        if len(self._there) >= self._capacity:
            self._num_owed += 1
            return
        settings = self._settings
        place = next(i for i in range(settings.nodes) if i not in self._there)
        self._num_added[place] += 1
        self._there[place] = self._num_added[place]
        spread = settings.price_spread * self._random.uniform(-1.0, 1.0)
        price = settings.price * (1.0 + spread)
        self._changes.append(NodeChange(now, self._name(place), ADD, price))
        life_s = self._random.expovariate(1.0 / (settings.mtbf_h * HOUR_S))
        self._after(now + life_s, partial(self._fail, place, self._there[place]))

    def _fail(self, place: int, number: int, now: float) -> None:
        if self._there.get(place) != number:
            return
        lost = [place]
        if self._random.random() < self._settings.correlated:
            first = place - place % self._settings.rack
            rack = range(first, first + self._settings.rack)
            lost = [other for other in rack if other in self._there]
        for other in lost:
            self._remove(other, now)
            self._after(now + self._settings.replace_s, self._add)

    def _change_capacity(self, now: float) -> None:
        """The cloud takes back the newest places above its capacity, or offers more."""
        settings = self._settings
        self._capacity = self._random.randint(settings.capacity_least, settings.nodes)
        for place in sorted(self._there)[self._capacity :]:
            self._remove(place, now)
            self._num_owed += 1
        num_new = min(self._num_owed, self._capacity - len(self._there))
        for _ in range(max(0, num_new)):
            self._num_owed -= 1
            self._add(now)
        self._after(now + settings.capacity_every_h * HOUR_S, self._change_capacity)

    def _remove(self, place: int, now: float) -> None:
        self._changes.append(NodeChange(now, self._name(place), REMOVE))
        del self._there[place]

    def _name(self, place: int) -> str:
        """A name for each node, so that a replacement is not the node that was lost."""
        return f"node{place}-{self._num_added[place]}"
