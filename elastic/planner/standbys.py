"""Standby workers: why a layout does not use them, in one line for the user."""

from __future__ import annotations

from elastic.geometry.layout import Layout


def describe_standbys(layout: Layout, num_standbys: int, num_microbatches: int) -> str:
    """How many workers stand by under a layout, why, and what to change; empty if none does or the
    layout and the number of microbatches do not say why."""
    group = layout.pp * layout.cp * layout.tp
    if num_standbys <= 0:
        return ""
    stand_by = f"{num_standbys:,} worker" + (" stands by" if num_standbys == 1 else "s stand by")
    if num_standbys < group:
        axes = (("pp", layout.pp), ("cp", layout.cp), ("tp", layout.tp))
        degrees = ", ".join(f"{name}={degree}" for name, degree in axes if degree > 1)
        return f"{stand_by}: {degrees} needs {group} workers for each replica or shard"
    if layout.dp * layout.fsdp != num_microbatches:
        return ""
    microbatches = f"{num_microbatches:,} microbatch" + ("" if num_microbatches == 1 else "es")
    receiver = "worker" if group == 1 else f"group of {group} workers"
    return (
        f"{stand_by}: a step has {microbatches}: use more, smaller microbatches, so that each "
        f"{receiver} gets one"
    )
