"""Whether it pays to exchange on-demand workers for spot workers.

Spot machines are cheaper, but each loss of one pauses the whole run, and so does the exchange
itself. Besides, both machines are paid for while the spot worker warms up.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

SPOT, ON_DEMAND = "spot", "on-demand"
"""The markets, as Ray's node label `ray.io/market-type` names them."""
USUAL_PRICES = (1.0, 3.0)
"""Spot and on demand, if the user has given none: clouds advertise a discount of 60 to 90 %."""


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of a worker and hour; any currency."""

    spot: float
    on_demand: float

    @classmethod
    def known(cls, spot: float, on_demand: float) -> Prices:
        """The given prices, or the usual relation if both are 0."""
        return cls(spot, on_demand) if spot or on_demand else cls(*USUAL_PRICES)


def spot_life_s(num_lost: int, worker_s: float) -> float:
    """How long a spot worker is expected to live, from the lifetimes so far, those of living
    workers included: the maximum-likelihood estimate for exponential lifetimes."""
    return worker_s / num_lost if num_lost else inf


def exchange_pays(
    num_exchanged: int,
    num_workers: int,
    prices: Prices,
    *,
    life_s: float,
    left_s: float,
    pause_s: float,
    start_s: float,
) -> bool:
    """Whether the run becomes cheaper by the exchange of `num_exchanged` of its on-demand workers.

    `life_s` is the expected life of a spot worker, `left_s` the time until the run ends, `pause_s`
    what a change of members costs, `start_s` how long a worker warms up.
    """
    seconds = min(life_s, left_s)
    saved = num_exchanged * (prices.on_demand - prices.spot) * seconds
    if saved <= 0:
        return False
    num_pauses = 1 + num_exchanged * (life_s <= left_s)
    pauses = num_pauses * pause_s * num_workers * prices.on_demand
    return saved > pauses + num_exchanged * prices.spot * start_s
