"""Model-parallel sharding of a custom module: `tp` by the recipe's plan, `pp` by its pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Literal

from torch import nn

from elastic.geometry.model_limits import Limits
from pipelines.errors import UserError
from pipelines.settings.overrides import similar_names
from pipelines.training.custom.custom_pipeline import layers_of, parts_of, why_not_sequential
from pipelines.training.workload.workload import Layer, ModelShape, Style, starred

CustomCut = Literal["colwise", "rowwise"]
NO_PLAN = (
    "the recipe has no plan for tp: "
    "Recipe(plan={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}, ...)"
)
NO_PIPELINE = (
    "the recipe does not list the blocks of its module in forward order, which pp needs: "
    "Recipe(pipeline=['embed', 'layers.*', 'head'], ...)"
)
REFUSED = {
    "cp": "it is unknown which part of a recipe's batch is a sequence",
    "ep": "it is unknown which of a recipe's modules are experts",
}


def shape_of(
    module: nn.Module,
    plan: Mapping[str, CustomCut],
    tp_divides: int | None = None,
    pipeline: Sequence[str] = (),
    blocks: Sequence[str] = (),
) -> ModelShape:
    """The shape of a module on the meta device, whose `blocks` are sharded one by one.

    Without a pipeline the module is one layer. Raises `UserError` for a plan or a pipeline that
    does not fit the module.
    """
    modules: dict[str, list[nn.Module]] = {}
    for name, part in module.named_modules():
        modules.setdefault(starred(name), []).append(part)
    styles = {name: _style(name, cut, modules) for name, cut in plan.items()}
    parts = parts_of(module, pipeline)
    no_pp = why_not_sequential(module, parts, blocks) if parts else NO_PIPELINE
    refused = [*REFUSED.items(), *([] if plan else [("tp", NO_PLAN)])]
    refused += [("pp", no_pp)] if no_pp else []
    widths = [_width(part, style) for name, style in styles.items() for part in modules[name]]
    divides = tp_divides or gcd(*widths) if plan else 1
    layers = layers_of(module, parts, styles) or (Layer((), 1),)
    limits = Limits(tp_divides=divides, num_layers=len(layers), refused=tuple(refused))
    return ModelShape(layers, limits, styles, sequence_parallel=False)


def _style(name: str, cut: str, modules: Mapping[str, Sequence[nn.Module]]) -> Style:
    parts = modules.get(name)
    if parts is None:
        raise UserError(f"plan: the module has no {name}; {similar_names(name, list(modules))}")
    kinds = {type(part) for part in parts}
    if all(issubclass(kind, nn.Linear) for kind in kinds) and cut in ("colwise", "rowwise"):
        return "colwise" if cut == "colwise" else "rowwise"
    if all(issubclass(kind, nn.Embedding) for kind in kinds) and cut == "rowwise":
        return "vocabulary"
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise UserError(
        f"plan: {name} is {names} and cannot be {cut}: nn.Linear can be colwise "
        "or rowwise, nn.Embedding rowwise"
    )


def _width(part: nn.Module, style: Style) -> int:
    """The width that `tp` must divide."""
    rows, columns = part.get_parameter("weight").shape
    return int(columns if style == "rowwise" else rows)
