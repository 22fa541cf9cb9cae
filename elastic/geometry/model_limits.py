"""What a model's shape allows of the model axes, with a reason for each refusal."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.geometry.layout import Layout


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the model axes; None bounds nothing.

    `tp_divides`: `tp` divides this (what heads and widths have in common; 1: nothing is cut).
    `num_layers`: the pipeline has no more stages than this. `seq_len`: each of the `2 x cp`
    parts of a sequence has a token, and `tp` cuts what a rank has of it evenly.
    `num_experts`: `ep` divides this (1: there are none). `one_stage` is why a rank has no more
    than one stage, if so. `refused` are axes that this model cannot be spread over at all, each
    with the reason.
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
                return f"tp={layout.tp}: this model has nothing that tp could cut evenly"
            common = "what the heads and the feed-forward width have in common"
            return f"tp={layout.tp} does not divide {self.tp_divides}, {common}"
        if self.one_stage is not None and layout.vp > 1:
            return f"vp={layout.vp}: {self.one_stage}"
        num_stages = layout.pp * layout.vp
        if self.num_layers is not None and num_stages > self.num_layers:
            return f"pp x vp = {num_stages} stages, but the model has {self.num_layers} layers"
        if self.seq_len is not None and layout.cp > 1 and 2 * layout.cp > self.seq_len:
            return f"cp={layout.cp} cuts a sequence of {self.seq_len} tokens in {2 * layout.cp}"
        num_parts = layout.cp * layout.tp
        if self.seq_len is not None and layout.tp > 1 and self.seq_len % num_parts:
            return (
                f"cp x tp = {num_parts} does not divide a sequence of {self.seq_len} tokens; "
                f"{self.seq_len // num_parts * num_parts or num_parts} tokens would do"
            )
        if self.num_experts is not None and self.num_experts % layout.ep:
            return (
                f"ep={layout.ep} does not divide the {self.num_experts} experts"
                if self.num_experts > 1
                else f"ep={layout.ep}: this model has no experts"
            )
        return None
