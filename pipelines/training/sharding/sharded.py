"""The seam between a rank's training and how `fsdp` shards its modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from actors.runtime.program import Interrupt


class Sharded(Protocol):
    """The modules of one rank (one, or a pipeline rank's stages, whose names differ), of whose
    parameters it keeps its own shards current."""

    modules: Sequence[nn.Module]

    def shards(self) -> dict[str, Tensor]:
        """The local shard of each parameter, as it is trained, by name; on the meta device until
        `adopt`."""

    def num_copies(self) -> dict[str, int]:
        """How many ranks hold each shard."""

    def adopt(self, shards: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Make these the state, uncopied where that is possible."""

    def gather(self, interrupt: Interrupt) -> None:
        """What must be there before a step's, or an evaluation's, first forward pass."""

    def accumulate(self, last: bool) -> None:
        """Called before a backward pass, with whether it is the step's last; need not be if that
        is not known. Gradients are summed over a step's passes."""

    def reduce(self, interrupt: Interrupt) -> None:
        """After a step's last backward pass: then `gradients` are complete."""

    def gradients(self) -> dict[str, Tensor]:
        """The local shards of the reduced gradients; parameters without one are left out."""

    def drop_gradients(self) -> None: ...

    def after_step(self) -> None:
        """The shards have other values now."""

    def release(self) -> None:
        """Let go of what was gathered; after an evaluation nothing else does that."""

    def resident_tensors(self) -> Iterable[Tensor]:
        """What is held of parameters at rest, between two steps."""

    def gradient_bytes(self) -> int:
        """What gradients take on the device when they are there, padding included."""


def assign(modules: Sequence[nn.Module], values: Mapping[str, Tensor]) -> None:
    """Put all parameters and buffers into the modules, uncopied. A parameter that has several names
    stays one; `values` has it by its first."""
    for module in modules:
        first = {parameter: name for name, parameter in module.named_parameters()}
        every = module.named_parameters(remove_duplicate=False)
        tied = {name: first[one] for name, one in every if first[one] != name}
        given = {name: values[name] for name in module.state_dict() if name not in tied}
        for name, source in tied.items():
            if not isinstance(given[source], nn.Parameter):
                trained = module.get_parameter(name).requires_grad
                given[source] = nn.Parameter(given[source], requires_grad=trained)
            given[name] = given[source]
        module.load_state_dict(given, assign=True)


def bring_constants(module: nn.Module, device: torch.device) -> None:
    """Move buffers that have values already, which are no part of the state, to the device."""
    for name, value in list(module.named_buffers()):
        if not value.is_meta:
            owner, _, key = name.rpartition(".")
            setattr(module.get_submodule(owner), key, value.to(device))


def storage_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """The bytes of the storages under these tensors that lie on a device, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def count_copies(parameter: Tensor) -> int:
    """Over how many ranks of its own mesh a parameter is replicated."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return prod(size for placement, size in sizes if isinstance(placement, Replicate))


def on_host(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor in host memory, pinned if the device copies from there by itself."""
    host = tensor.cpu()
    return host.pin_memory() if device.type == "cuda" else host


@torch.no_grad()
def as_distributed(local: Tensor, like: Tensor) -> Tensor:
    """A local tensor as the distributed one that `like` is, or as it is."""
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
    """The part of a tensor that lies on this rank, outside of autograd."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
