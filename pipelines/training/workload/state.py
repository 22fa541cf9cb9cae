"""The logical tensors of a run's state: names, shapes and initial values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from actors.distributed.torch_private import direct_buffers
from elastic.geometry.regions import Region
from elastic.geometry.tensor_specs import Kind, Ownership, TensorSpec, deal_out
from pipelines.settings import TrainSettings
from pipelines.training.workload.initial_values import slices_of
from pipelines.training.workload.layer_tensors import layer_holding, layers_by_module, tied_ends
from pipelines.training.workload.optimizer import (
    AdamWBySettings,
    OptimizerFactory,
    is_elementwise,
    state_shape,
    state_templates,
)
from pipelines.training.workload.parallel_groups import ALONE, ParallelGroups
from pipelines.training.workload.workload import ModelShape, Style, Workload, nothing

OPTIMIZER = "optimizer."
SCRIPT = OPTIMIZER + "script"
"""What a script changes has this name, or one that begins with it and a slash."""
NUMBER_SHAPES = {False: (), True: (1,)}
"""The shape of a number in the optimizer state of a parameter, by whether one rank owns it: only a
tensor with a dim can have an empty part, as the other ranks do."""
TP_DIMS: dict[Style, int] = {
    "colwise": 0,
    "colwise_gathered": 0,
    "logits": 0,
    "vocabulary": 0,
    "rowwise": 1,
}
"""The dim of a weight that `tp` shards, by its module's style; a bias without that dim is
replicated."""


def optimizer_name(parameter: str, key: str) -> str:
    """The logical name of one optimizer state tensor of a parameter."""
    return f"{OPTIMIZER}{parameter}.{key}"


def stored_dtype(settings: TrainSettings) -> torch.dtype:
    """The dtype of stored parameters; with mixed precision it is float32."""
    return torch.float64 if settings.dtype == "float64" else torch.float32


def in_stored_dtype(module: nn.Module, settings: TrainSettings) -> nn.Module:
    """The module with its floating-point tensors in the dtype of storage.

    `Module.to` would make complex tensors real. A buffer of several modules stays one.
    """
    tables = [direct_buffers(part) for part in module.modules()]
    before = [dict(table) for table in tables]
    module.double() if stored_dtype(settings) == torch.float64 else module.float()
    shared: dict[int, Tensor | None] = {}
    for table, held in zip(tables, before, strict=True):
        for key, value in held.items():
            table[key] = shared.setdefault(id(value), table[key])
    return module


def optimizer_factory_of(workload: Workload, settings: TrainSettings) -> OptimizerFactory:
    """The workload's optimizer, or AdamW from the settings."""
    return workload.optimizer_factory or AdamWBySettings(settings.optimizer)


def build_on_meta(
    workload: Workload, settings: TrainSettings, parallel: ParallelGroups = ALONE
) -> nn.Module:
    """The workload's module on the meta device: shapes without values."""
    with torch.device("meta"):
        return in_stored_dtype(workload.module(parallel), settings)


def state_specs(workload: Workload, settings: TrainSettings) -> tuple[TensorSpec, ...]:
    """The specs of parameters, persistent buffers and optimizer state, each in the module's order.

    Frozen parameters have no optimizer state. Optimizer state of a parameter's shape is sharded as
    the parameter: dim 0 over `fsdp`.
    """
    module = build_on_meta(workload, settings)
    owners = ownerships(workload, module)
    builder = SpecBuilder(workload.shape(), owners, tied_ends(workload.shape().layers, module))
    parameters = dict(module.named_parameters())
    specs = [builder.spec(name, value, "parameter") for name, value in parameters.items()]
    specs += [builder.spec(name, value, "buffer") for name, value in buffers(module)]
    optimizer_factory = optimizer_factory_of(workload, settings)
    templates = state_templates(optimizer_factory, trained_dims(module), stored_dtype(settings))
    for name, template in templates.items():
        parameter = parameters[name]
        for key, value in template.items():
            shape = state_shape(value, parameter.shape)
            like = parameter.new_empty(shape or NUMBER_SHAPES[name in owners], dtype=value.dtype)
            spec = builder.spec(name, like, "optimizer", optimizer_name(name, key))
            if name not in owners and not is_elementwise(value, parameter.ndim):
                spec = replace(spec, fsdp_dim=None, tp_dim=None, ep_dim=None)
            specs.append(spec)
    for name, value in optimizer_factory.script_state.items():
        specs.append(
            TensorSpec(SCRIPT + name, tuple(value.shape), name_of(value.dtype), kind="script")
        )
    return tuple(specs)


def ownerships(workload: Workload, module: nn.Module) -> dict[str, Ownership]:
    """The ownership of the parameters that one rank must update whole, by their names in the
    module of all stages."""
    whole = {
        name: parameter.numel()
        for name, parameter in module.named_parameters()
        if name in workload.whole_parameters
    }
    return dict(zip(whole, deal_out(list(whole.values())), strict=True))


def is_of_script(name: str) -> bool:
    """Whether a tensor of the state is one that a script changes."""
    return name == SCRIPT or name.startswith(f"{SCRIPT}/")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def trained_dims(module: nn.Module) -> dict[str, int]:
    """The number of dims of each parameter that is not frozen."""
    return {
        name: parameter.ndim
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


class SpecBuilder:
    """Builds tensor specs: the layer of a tensor, and the dim that each axis shards."""

    def __init__(
        self, shape: ModelShape, owners: Mapping[str, Ownership], tied: Collection[str] = ()
    ) -> None:
        """`owners` are those of the parameters that one rank updates whole, `tied` are those of
        `tied_ends`."""
        self.shape = shape
        self.owners = owners
        self.tied = tied
        self.costs = tuple(layer.cost for layer in shape.layers)
        self.layer_of = layers_by_module(shape.layers)

    def spec(self, owner: str, value: Tensor, kind: Kind, name: str | None = None) -> TensorSpec:
        """The spec of the parameter or buffer `owner`, or of its optimizer state `name`."""
        expert = self.shape.belongs_to_experts(owner)
        sharded = value.ndim > 0 and kind != "buffer"
        layer = self.layer(owner)
        return TensorSpec(
            name or owner,
            tuple(value.shape),
            name_of(value.dtype),
            layer=layer,
            fsdp_dim=0 if sharded else None,
            tp_dim=self._tp_dim(owner, value) if sharded else None,
            ep_dim=0 if sharded and expert else None,
            kind=kind,
            layer_costs=self.costs if layer is not None else (),
            ownership=self.owners.get(owner),
            ties_ends=owner in self.tied,
        )

    def layer(self, owner: str) -> int | None:
        """The index of the layer whose module holds this tensor, if any."""
        return layer_holding(self.layer_of, owner)

    def _tp_dim(self, owner: str, value: Tensor) -> int | None:
        module, _, _ = owner.rpartition(".")
        style = self.shape.style_of(module)
        dim = TP_DIMS.get(style) if style else None
        return dim if dim is not None and dim < value.ndim else None


def buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The persistent buffers of a module: those in its `state_dict`."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    state = module.state_dict(keep_vars=True)
    return ((name, value) for name, value in state.items() if name not in parameters)


def initial_value(
    workload: Workload,
    settings: TrainSettings,
    spec: TensorSpec,
    region: Region,
    interrupt: Callable[[], None] = nothing,
) -> Tensor:
    """A region of a tensor at step 0, on the host: the same values under every sharding.

    Optimizer state is 0. `interrupt` is called during the drawing and may raise.
    """
    dtype = getattr(torch, spec.dtype)
    if is_of_script(spec.name):
        state = optimizer_factory_of(workload, settings).script_state
        return state[spec.name.removeprefix(SCRIPT)][slices_of(region)].clone()
    if spec.name.startswith(OPTIMIZER):
        return torch.zeros(region.shape, dtype=dtype)
    value = workload.draw(spec.name, spec.shape, region, settings.seed, interrupt)
    return value.to(dtype).contiguous()
