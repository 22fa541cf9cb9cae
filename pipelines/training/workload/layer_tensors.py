"""The pipeline layers of a module's tensors, and the parameters that two layers share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from pipelines.training.workload.workload import Layer


def layers_by_module(layers: Sequence[Layer]) -> dict[str, int]:
    """The index of the layer of each module."""
    return {module: number for number, layer in enumerate(layers) for module in layer.modules}


def layer_holding(layer_of: Mapping[str, int], tensor: str) -> int | None:
    """The index of the layer whose module holds a tensor, if any; see `layers_by_module`."""
    parts = tensor.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((layer_of[prefix] for prefix in prefixes if prefix in layer_of), None)


def names_of_parameters(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter, those of a tied one in the order of the modules."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def tied_ends(layers: Sequence[Layer], module: nn.Module) -> frozenset[str]:
    """The first names of the parameters that the first and the last layer share, as embedding and
    head do, in the module of all stages."""
    ends = {0, len(layers) - 1}
    return frozenset(names[0] for names, holding in _shared(layers, module) if holding == ends)


def other_tie(layers: Sequence[Layer], module: nn.Module) -> tuple[str, str] | None:
    """Two names of a parameter that layers other than the first and the last one share, if any."""
    ends = {0, len(layers) - 1}
    return next(
        ((names[0], names[-1]) for names, holding in _shared(layers, module) if holding != ends),
        None,
    )


def _shared(
    layers: Sequence[Layer], module: nn.Module
) -> Iterator[tuple[list[str], set[int | None]]]:
    """The names and the layers of each parameter that several layers hold."""
    layer_of = layers_by_module(layers)
    for names in names_of_parameters(module).values():
        holding = {layer_holding(layer_of, name) for name in names}
        if len(holding) > 1:
            yield names, holding
