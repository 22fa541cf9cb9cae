"""Settings of the markets: spot and on-demand machines."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, NonNegativeFloat, model_validator

from pipelines.settings.bounds import Seconds
from pipelines.settings.setting import Settings, setting

UNITS_S = {"min": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(text: str) -> float | None:
    """The seconds of a duration such as `12h`; None if the text is no duration."""
    for unit, seconds in UNITS_S.items():
        number = text.removesuffix(unit)
        if number != text and number.replace(".", "", 1).isdecimal() and float(number) > 0:
            return float(number) * seconds
    return None


def _refuse_no_time(text: str) -> str:
    if text and _seconds(text) is None:
        try:
            datetime.fromisoformat(text)
        except ValueError:
            raise ValueError(
                "write a duration such as 90min, 12h or 3d, or 2026-12-01T08:00"
            ) from None
    return text


DoneBy = Annotated[
    str,
    BeforeValidator(lambda value: "" if value is None else str(value)),
    AfterValidator(_refuse_no_time),
]
"""A duration since the run's first start, or a date and time."""


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
    max_price_per_hour: NonNegativeFloat = setting(
        0.0,
        "No worker is requested with which all together would cost more an hour; it needs both "
        "prices, and `use` other than `any`. 0: any price.",
    )
    done_by: DoneBy = setting(
        "",
        "With `fallback`: on-demand machines are used only as far as the run needs them to be done "
        "by this time: a duration from its first start, such as `12h`, or a date and time such as "
        "`2026-12-01T08:00`; empty: whenever spot is short.",
    )

    @model_validator(mode="after")
    def _refuse_unknown_prices(self) -> MarketSettings:
        if self.max_price_per_hour and not (self.spot_price and self.on_demand_price):
            raise ValueError("max_price_per_hour: give spot_price and on_demand_price, too")
        if self.max_price_per_hour and self.use == "any":
            raise ValueError(
                "max_price_per_hour: set use to spot, on_demand or fallback, so that the price of "
                "each worker is known"
            )
        return self

    @property
    def done_by_s(self) -> float:
        """The duration; 0 without one."""
        return _seconds(self.done_by) or 0.0

    @property
    def done_by_at(self) -> float:
        """The date and time in seconds since the epoch; 0 without one."""
        if not self.done_by or self.done_by_s:
            return 0.0
        return datetime.fromisoformat(self.done_by).timestamp()
