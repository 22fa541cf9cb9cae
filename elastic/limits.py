"""What a model's shape allows of the model axes, with a reason for each refusal."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.layout import Layout


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the model axes; None bounds nothing.

    `tp_divides`: `tp` divides this (attention's key and value heads). `num_layers`: the
    pipeline has no more stages than this. `seq_len`: each of the `2 x cp` parts of a sequence
    has a token. `num_experts`: `ep` divides this (1: there are none).
    """

    tp_divides: int | None = None
    num_layers: int | None = None
    seq_len: int | None = None
    num_experts: int | None = None

    def refusal(self, layout: Layout) -> str | None:
        """Why this layout is not possible, or None."""
        if self.tp_divides is not None and self.tp_divides % layout.tp:
            if self.tp_divides == 1:
                return (
                    f"tp={layout.tp}: tp divides attention heads; this model has none for it"
                )
            return f"tp={layout.tp} does not divide {self.tp_divides}, the key and value heads"
        num_stages = layout.pp * layout.vp
        if self.num_layers is not None and num_stages > self.num_layers:
            return f"pp x vp = {num_stages} stages, but the model has {self.num_layers} layers"
        if self.seq_len is not None and layout.cp > 1 and 2 * layout.cp > self.seq_len:
            return f"cp={layout.cp} cuts a sequence of {self.seq_len} tokens in {2 * layout.cp}"
        if self.num_experts is not None and self.num_experts % layout.ep:
            return (
                f"ep={layout.ep} does not divide the {self.num_experts} experts"
                if self.num_experts > 1
                else f"ep={layout.ep}: this model has no experts"
            )
        return None
