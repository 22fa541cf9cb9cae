"""Limits of the model axes that follow from a model's shape, with a reason for each refusal."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.geometry.layout import Layout


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the model axes; None means no bound.

    `tp_divides`: `tp` must divide this, the greatest common divisor of heads and widths (1: the
    model has nothing that `tp` can cut). `num_layers`: the largest number of pipeline stages.
    `seq_len`: each of the `2 x cp` parts of a sequence needs a token, and `tp` must cut a rank's
    part evenly. `num_experts`: `ep` must divide this (1: no experts). `one_stage`: why a rank can
    have only one stage, if so. `refused`: axes that this model does not support, each with the
    reason.
    """

    tp_divides: int | None = None
    num_layers: int | None = None
    seq_len: int | None = None
    num_experts: int | None = None
    one_stage: str | None = None
    refused: tuple[tuple[str, str], ...] = ()

    def refusal(self, layout: Layout) -> str | None:
        """Why this layout is not possible, or None."""
        for axis, reason in self.refused:
            if getattr(layout, axis) > 1:
                return f"{axis}={getattr(layout, axis)}: {reason}"
        if self.tp_divides is not None and self.tp_divides % layout.tp:
            if self.tp_divides == 1:
                return f"tp={layout.tp}: this model has nothing that tp can cut evenly; use tp=1"
            common = "the greatest common divisor of the heads and the feed-forward width"
            return f"tp={layout.tp} does not divide {self.tp_divides}, {common}"
        if self.one_stage is not None and layout.vp > 1:
            return f"vp={layout.vp}: {self.one_stage}"
        num_stages = layout.pp * layout.vp
        if self.num_layers is not None and num_stages > self.num_layers:
            return f"pp x vp = {num_stages} stages, but the model has {self.num_layers} layers"
        if self.seq_len is not None and layout.cp > 1 and 2 * layout.cp > self.seq_len:
            return (
                f"cp={layout.cp} cuts a sequence in {2 * layout.cp} parts, but it has only "
                f"{self.seq_len} tokens"
            )
        num_parts = layout.cp * layout.tp
        if self.seq_len is not None and layout.tp > 1 and self.seq_len % num_parts:
            return (
                f"cp x tp = {num_parts} does not divide a sequence of {self.seq_len} tokens; "
                f"use {self.seq_len // num_parts * num_parts or num_parts} tokens"
            )
        if self.num_experts is not None and self.num_experts % layout.ep:
            return (
                f"ep={layout.ep} does not divide the {self.num_experts} experts"
                if self.num_experts > 1
                else f"ep={layout.ep}: this model has no experts; use ep=1"
            )
        return None
