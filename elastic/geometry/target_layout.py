"""Target layout: the model axes and the data axes that the user requests for full capacity."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from elastic.geometry.layout import Layout


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """The requested layout: model axes to keep while they fit, and data axes at full capacity.

    If neither `dp` nor `fsdp` is given, the planner chooses both. If one of them is given, the
    other is 1. `max_workers=None` means all available workers.
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
        """Read `dp=2,tp=2`; an empty text requests no layout. Raises `InvalidLayout`."""
        layout = Layout.parse(text) if text.strip() else Layout()
        named_axes = {part.partition("=")[0].strip() for part in text.split(",")}
        return cls(
            pp=layout.pp,
            cp=layout.cp,
            tp=layout.tp,
            ep=layout.ep,
            zero=layout.zero,
            vp=layout.vp,
            dp=layout.dp if "dp" in named_axes else None,
            fsdp=layout.fsdp if "fsdp" in named_axes else None,
            max_workers=max_workers,
        )

    @property
    def num_model_ranks(self) -> int:
        """The number of workers of each data rank."""
        return self.pp * self.cp * self.tp

    @property
    def data_axes(self) -> tuple[int, int] | None:
        """The requested (dp, fsdp), or None if the planner chooses them."""
        if self.dp is None and self.fsdp is None:
            return None
        return self.dp or 1, self.fsdp or 1

    @property
    def least_fsdp(self) -> int:
        """The smallest `fsdp` that `ep` folds out of; `ep` folds out of its multiples only."""
        return self.ep // gcd(self.ep, self.cp * self.tp)

    def layout(self, dp: int, fsdp: int) -> Layout:
        """The layout with these data axes, and the largest part of `ep` that folds out of it."""
        ep = gcd(self.ep, fsdp * self.cp * self.tp)
        return Layout(self.pp, dp, fsdp, self.cp, self.tp, ep, self.zero, self.vp)

    def is_met(self, layout: Layout) -> bool:
        """Whether a layout is the requested one at full capacity."""
        dp, fsdp = self.data_axes or (layout.dp, layout.fsdp)
        return fsdp % self.least_fsdp == 0 and layout == self.layout(dp, fsdp)
