"""How many workers a run may request under its highest price an hour."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from elastic.planner.market.exchange import ON_DEMAND, Prices

ROUNDING = 1e-9


def num_affordable(
    most_per_hour: float, prices: Prices, markets: Iterable[str], requested: str
) -> float:
    """How many workers more fit under the price, if they are requested on one market.

    `markets` are those of the present workers. A worker whose machine is being given back is one of
    them, and so is one without a machine yet: it may come at any time. 0: any price.
    """
    if not most_per_hour:
        return inf
    paid = sum(_price(prices, market) for market in markets)
    return max(0, int((most_per_hour - paid) / _price(prices, requested) + ROUNDING))


def _price(prices: Prices, market: str) -> float:
    return prices.on_demand if market == ON_DEMAND else prices.spot
