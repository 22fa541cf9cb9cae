"""Settings of the markets: spot and on-demand machines."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from pipelines.settings.bounds import Seconds
from pipelines.settings.setting import Settings, setting


class MarketSettings(Settings):
    """Spot and on-demand machines, by Ray's label `ray.io/market-type`; see docs/cluster.md."""

    use: Literal["any", "spot", "on_demand", "fallback"] = setting(
        "any",
        "On which machines workers are requested: `any`, `spot`, `on_demand`, or `fallback`: on "
        "spot machines, and on demand while these are short.",
    )
    on_demand_after_s: Seconds = setting(
        600.0,
        "With `fallback`, a request without a machine for this long is made again on the other "
        "market. Give more than a machine takes to start.",
    )
    retry_spot_after_s: Seconds = setting(
        1800.0,
        "Then spot machines count as short for this long, and twice as long after each further "
        "refusal, up to an hour. Afterwards on-demand workers are exchanged for spot workers.",
    )
    spot_price: NonNegativeFloat = setting(0.0, "The price of a worker and hour on a spot machine.")
    on_demand_price: NonNegativeFloat = setting(
        0.0,
        "The same on an on-demand machine. Workers are exchanged if that makes the run cheaper; "
        "if both prices are 0, on demand counts as three times as expensive.",
    )
