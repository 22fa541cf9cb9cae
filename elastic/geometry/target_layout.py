"""What the user asks for: model axes, and data axes at full strength."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from elastic.geometry.layout import Layout


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """The model axes for as long as they fit, the data axes at full strength.

    With neither `dp` nor `fsdp` the data axes are planned from the start; one of them alone
    means that the other is 1. `max_workers=None`: as many as there are.
    """

    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int = 3
    vp: int = 1
    dp: int | None = None
    fsdp: int | None = None
    max_workers: int | None = None

    @classmethod
    def parse(cls, text: str, max_workers: int | None = None) -> TargetLayout:
        """Read `dp=2,tp=2`; an empty text wishes nothing. Raises `InvalidLayout`."""
        layout = Layout.parse(text) if text.strip() else Layout()
        told = {part.partition("=")[0].strip() for part in text.split(",")}
        return cls(
            pp=layout.pp,
            cp=layout.cp,
            tp=layout.tp,
            ep=layout.ep,
            zero=layout.zero,
            vp=layout.vp,
            dp=layout.dp if "dp" in told else None,
            fsdp=layout.fsdp if "fsdp" in told else None,
            max_workers=max_workers,
        )

    @property
    def num_model_ranks(self) -> int:
        """Workers for each data rank."""
        return self.pp * self.cp * self.tp

    @property
    def data_axes(self) -> tuple[int, int] | None:
        """The wished (dp, fsdp), if any."""
        if self.dp is None and self.fsdp is None:
            return None
        return self.dp or 1, self.fsdp or 1

    @property
    def least_fsdp(self) -> int:
        """All of `ep` folds out of the multiples of this `fsdp`, and of no other."""
        return self.ep // gcd(self.ep, self.cp * self.tp)

    def layout(self, dp: int, fsdp: int) -> Layout:
        """The model axes with these data axes, and as much of `ep` as folds out of them."""
        ep = gcd(self.ep, fsdp * self.cp * self.tp)
        return Layout(self.pp, dp, fsdp, self.cp, self.tp, ep, self.zero, self.vp)

    def is_met(self, layout: Layout) -> bool:
        """Whether this is what was asked for, at full strength."""
        dp, fsdp = self.data_axes or (layout.dp, layout.fsdp)
        return fsdp % self.least_fsdp == 0 and layout == self.layout(dp, fsdp)
