"""What a module of the user's own offers to the model axes: `tp` by a plan, `pp` by a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Literal

from torch import nn

from elastic.geometry.model_limits import Limits
from pipelines.settings.errors import UserError
from pipelines.settings.overrides import near
from pipelines.training.custom.custom_pipeline import layers_of, parts_of, why_not_alone
from pipelines.training.workload.workload import Layer, ModelShape, Style, starred

CustomCut = Literal["colwise", "rowwise"]
NO_PLAN = (
    "the recipe has no plan, which says how tp cuts its module: "
    "Recipe(plan={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}, ...)"
)
NO_PIPELINE = (
    "a recipe's loss calls its module as a whole, which no pipeline can cut unless the recipe "
    "lists its blocks in forward order: Recipe(pipeline=['embed', 'layers.*', 'head'], ...)"
)
REFUSED = {
    "cp": "nobody knows what of a recipe's batch is a sequence",
    "ep": "nobody knows which of a recipe's modules are experts",
}


def shape_of(
    module: nn.Module,
    plan: Mapping[str, CustomCut],
    tp_divides: int | None = None,
    pipeline: Sequence[str] = (),
    blocks: Sequence[str] = (),
) -> ModelShape:
    """Of a module on the meta device, whose `blocks` are sharded one by one; without a pipeline
    it is one layer.

    Raises `UserError` for a plan or a pipeline that does not fit it.
    """
    there: dict[str, list[nn.Module]] = {}
    for name, part in module.named_modules():
        there.setdefault(starred(name), []).append(part)
    styles = {name: _style(name, cut, there) for name, cut in plan.items()}
    parts = parts_of(module, pipeline)
    no_pp = why_not_alone(module, parts, blocks) if parts else NO_PIPELINE
    refused = [*REFUSED.items(), *([] if plan else [("tp", NO_PLAN)])]
    refused += [("pp", no_pp)] if no_pp else []
    widths = [_width(part, style) for name, style in styles.items() for part in there[name]]
    divides = tp_divides or gcd(*widths) if plan else 1
    layers = layers_of(module, parts, styles) or (Layer((), 1),)
    limits = Limits(tp_divides=divides, num_layers=len(layers), refused=tuple(refused))
    return ModelShape(layers, limits, styles, sequence_parallel=False)


def _style(name: str, cut: str, there: Mapping[str, Sequence[nn.Module]]) -> Style:
    parts = there.get(name)
    if parts is None:
        raise UserError(f"plan: the module has no {name}; {near(name, list(there))}")
    kinds = {type(part) for part in parts}
    if all(issubclass(kind, nn.Linear) for kind in kinds) and cut in ("colwise", "rowwise"):
        return "colwise" if cut == "colwise" else "rowwise"
    if all(issubclass(kind, nn.Embedding) for kind in kinds) and cut == "rowwise":
        return "vocabulary"
    told = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise UserError(
        f"plan: {name} is {told} and cannot be cut {cut}: nn.Linear can be colwise "
        "or rowwise, nn.Embedding rowwise"
    )


def _width(part: nn.Module, style: Style) -> int:
    """What `tp` has to divide."""
    rows, columns = part.weight.shape
    return int(columns if style == "rowwise" else rows)
