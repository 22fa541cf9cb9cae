"""The interface between a replica and the sharding of its modules over `fsdp`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from actors.runtime.program import Interrupt


class Sharded(Protocol):
    """The modules of one rank and its shards of their parameters.

    There is one module, or one for each stage of a pipeline rank, with disjoint parameter names.
    The optimizer updates only this rank's shards.
    """

    modules: Sequence[nn.Module]

    @property
    def elsewhere(self) -> Mapping[str, tuple[int, ...]]:
        """The whole shape of each parameter that another rank of `fsdp` updates whole."""

    def shards(self) -> dict[str, Tensor]:
        """The live local shard of each parameter by name; on the meta device until `adopt`."""

    def num_copies(self) -> dict[str, int]:
        """The number of ranks that hold each shard."""

    def adopt(self, shards: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Make these tensors the state, without copies where possible."""

    def gather(self, interrupt: Interrupt) -> None:
        """Gather parameters before the first forward pass of a step or of an evaluation."""

    def accumulate(self, last: bool) -> None:
        """Prepare the next backward pass; `last` says whether it is the step's last.

        The call may be omitted if that is unknown. Gradients are summed over a step's passes.
        """

    def sum_gradients(self, number: int) -> None:
        """Add the gradients of one module, by its number, to sums in the dtype of the reduction.

        To be called after a backward pass of weights alone, in which autograd calls no hook: it
        leaves gradients in the dtype of the computation, and the next pass would add to them.
        """

    def reduce(self, interrupt: Interrupt) -> None:
        """Complete `gradients` after a step's last backward pass."""

    def gradients(self) -> dict[str, Tensor]:
        """The local shards of the reduced gradients, without parameters that have none."""

    def drop_gradients(self, chosen: Callable[[str], bool] | None = None) -> None:
        """Drop the reduced gradients of the parameters with chosen names; of all by default."""

    def after_step(self) -> None:
        """Note that the optimizer has changed the shards."""

    def release(self) -> None:
        """Release gathered parameters; after an evaluation nothing else does."""

    def resident_tensors(self) -> Iterable[Tensor]:
        """The tensors that parameters occupy between two steps."""

    def gradient_bytes(self) -> int:
        """The bytes of the gradients on the device while they exist, padding included."""


def assign(
    modules: Sequence[nn.Module], values: Mapping[str, Tensor], kept: Collection[str] = ()
) -> None:
    """Assign all parameters and buffers to the modules without copies, except those to be kept.

    A tied parameter stays tied; `values` has it under its first name.
    """
    for module in modules:
        held = module.state_dict(keep_vars=True)
        values = {**values, **{name: held[name] for name in kept if name in held}}
        first = {parameter: name for name, parameter in module.named_parameters()}
        named = module.named_parameters(remove_duplicate=False)
        tied = {name: first[value] for name, value in named if first[value] != name}
        assigned = {name: values[name] for name in module.state_dict() if name not in tied}
        for name, source in tied.items():
            if not isinstance(assigned[source], nn.Parameter):
                trained = module.get_parameter(name).requires_grad
                assigned[source] = nn.Parameter(assigned[source], requires_grad=trained)
            assigned[name] = assigned[source]
        module.load_state_dict(assigned, assign=True)


def names_without_dims(modules: Sequence[nn.Module]) -> set[str]:
    """The names of the parameters without dims, which no axis can cut."""
    named = (pair for module in modules for pair in module.named_parameters())
    return {name for name, parameter in named if not parameter.ndim}


def bring_constants(module: nn.Module, device: torch.device) -> None:
    """Move non-persistent buffers that already have values to the device.

    A buffer of several modules stays one.
    """
    moved: dict[int, Tensor] = {}
    for name, value in list(module.named_buffers(remove_duplicate=False)):
        if value.is_meta:
            continue
        if id(value) not in moved:
            moved[id(value)] = value.to(device)
        owner, _, key = name.rpartition(".")
        setattr(module.get_submodule(owner), key, moved[id(value)])


def storage_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """The bytes of the storages of these tensors on a device, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def count_copies(parameter: Tensor) -> int:
    """The number of ranks of its mesh over which a parameter is replicated."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return prod(size for placement, size in sizes if isinstance(placement, Replicate))


def on_host(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor in host memory, pinned if the device is a GPU."""
    host = tensor.cpu()
    return host.pin_memory() if device.type == "cuda" else host


@torch.no_grad()
def as_distributed(local: Tensor, like: Tensor) -> Tensor:
    """A local tensor as a DTensor like `like`; unchanged if `like` is not a DTensor."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


@torch.no_grad()
def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, outside of autograd."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
