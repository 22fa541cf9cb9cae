"""Model-parallel sharding of a custom module: `tp` by the recipe's plan, `pp` by its pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

from torch import nn

from elastic.geometry.model_limits import Limits
from pipelines.errors import UserError
from pipelines.settings.overrides import similar_names
from pipelines.training.custom.modules.custom_pipeline import (
    layers_of,
    parts_of,
    why_not_sequential,
)
from pipelines.training.custom.parallel_styles import CustomCut, names_matching, style_of
from pipelines.training.models.expert_parallel import number_of
from pipelines.training.workload.state import TP_DIMS
from pipelines.training.workload.workload import Layer, ModelShape, Style, starred

NO_PLAN = (
    "the recipe has no plan for tp: Recipe(plan={'layers.*.up': 'colwise', 'layers.*.down': "
    "'rowwise'}, ...), or in a custom loop run.prepare(model, ..., plan={...})"
)
NO_PIPELINE = (
    "the recipe does not list the blocks of its module in forward order, which pp needs: "
    "Recipe(pipeline=['embed', 'layers.*', 'head'], ...)"
)
REFUSED = {
    "cp": "the recipe does not say which dims of its batch are the sequence: "
    "Recipe(sequence={'tokens': 1, 'positions': 1, 'targets': 1}, ...), or in a custom loop "
    "run.prepare(model, ..., sequence={...})",
    "ep": "it is unknown which of a recipe's modules are experts: "
    "Recipe(experts=['layers.*.experts'], ...), or in a custom loop run.prepare(model, ..., "
    "experts=[...])",
}


def shape_of(
    module: nn.Module,
    plan: Mapping[str, CustomCut],
    tp_divides: int | None = None,
    pipeline: Sequence[str] = (),
    blocks: Sequence[str] = (),
    has_sequence: bool = False,
    experts: Sequence[str] = (),
) -> ModelShape:
    """The shape of a module on the meta device, whose `blocks` are sharded one by one.

    Without a pipeline the module is one layer. Raises `UserError` for a plan, a pipeline or experts
    that do not fit the module.
    """
    styles = _styles(module, plan)
    parts = parts_of(module, pipeline)
    known = {"cp": has_sequence, "ep": bool(experts)}
    unknown = {axis: why for axis, why in REFUSED.items() if not known[axis]}
    numbers = _numbers_of_experts(module, experts)
    refused = [*unknown.items(), *([] if styles else [("tp", NO_PLAN)])]
    widths = [
        _width(module.get_submodule(name), style)
        for name, style in styles.items()
        if style in ("colwise", "rowwise")
    ]
    divides = tp_divides or (gcd(*widths) or None if styles else 1)
    layers = layers_of(module, parts, styles) or (Layer((), 1),)
    no_pp = why_not_sequential(module, parts, blocks, layers) if parts else NO_PIPELINE
    refused += [("pp", no_pp)] if no_pp else []
    limits = Limits(
        tp_divides=divides,
        num_layers=len(layers),
        num_experts=gcd(*numbers.values()) or None,
        refused=tuple(refused),
    )
    return ModelShape(layers, limits, styles, tuple(numbers), sequence_parallel=False)


def _numbers_of_experts(module: nn.Module, experts: Sequence[str]) -> dict[str, int]:
    """The number of experts of each module of them."""
    modules, numbers = dict(module.named_modules()), {}
    for pattern in experts:
        names = names_matching(pattern, modules)
        if not names:
            known = list(dict.fromkeys([*map(starred, modules), *modules]))
            raise UserError(
                f"experts: the module has no {pattern}; {similar_names(pattern, known)}"
            )
        for name in names:
            numbers[name] = number_of(modules[name])
            if not numbers[name]:
                raise UserError(_why_no_experts(name, modules[name]))
    return numbers


def _why_no_experts(name: str, part: nn.Module) -> str:
    for inner, listed in part.named_modules():
        if isinstance(listed, nn.ModuleList) and len(listed):
            place = f"{name}.{inner}".rstrip(".")
            weight = next((key for key, _ in listed[0].named_parameters()), "weight")
            return (
                f"experts: {place} is a list of {len(listed)} modules: stack their weights in one "
                f"module, as in nn.Parameter(torch.stack([e.{weight} for e in experts])), which is "
                "called with tokens (any, dim), chosen experts (any, k) and weights (any, k)"
            )
    return (
        f"experts: dim 0 of each parameter of {name} must be the number of experts, and it must "
        "have no buffers: stack the weights of all experts"
    )


def _styles(module: nn.Module, plan: Mapping[str, CustomCut]) -> dict[str, Style]:
    """The style of each module that `tp` shards, by its own name, which a later name in the plan
    may replace."""
    modules = dict(module.named_modules())
    styles: dict[str, Style | None] = {}
    for pattern, planned in plan.items():
        names = names_matching(pattern, modules)
        if not names:
            known = list(dict.fromkeys([*map(starred, modules), *modules]))
            raise UserError(f"plan: the module has no {pattern}; {similar_names(pattern, known)}")
        style = style_of(pattern, planned, [modules[name] for name in names])
        styles |= dict.fromkeys(names, style)
    found = {name: style for name, style in styles.items() if style is not None}
    _refuse_parted_ties(module, found)
    return found


def _refuse_parted_ties(module: nn.Module, styles: Mapping[str, Style]) -> None:
    """Raise `UserError` if two modules share a weight that `tp` would shard for one alone."""
    first: dict[nn.Parameter, tuple[str, int | None]] = {}
    for name, part in module.named_modules():
        style = styles.get(name)
        for key, parameter in part.named_parameters(recurse=False):
            dim = TP_DIMS.get(style) if style else None
            other, other_dim = first.setdefault(parameter, (name, dim))
            if dim != other_dim:
                raise UserError(
                    f"plan: {name} and {other} share their {key}, but the plan shards it for one "
                    "of them alone, or otherwise: plan both alike, or neither"
                )


def _width(part: nn.Module, style: Style) -> int:
    """The width that `tp` must divide."""
    rows, columns = part.get_parameter("weight").shape
    return int(columns if style == "rowwise" else rows)
