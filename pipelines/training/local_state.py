"""The tensors that one rank trains: local shards, buffers, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from actors.program import StateBytes
from pipelines.settings import TrainSettings
from pipelines.training.optimizer import LocalOptimizer, state_template
from pipelines.training.state import optimizer_name, stored_dtype


class LocalState:
    """Plain tensors by logical name, sharing memory with sharded modules and their optimizer."""

    def __init__(self, modules: Sequence[nn.Module], settings: TrainSettings) -> None:
        """Take modules (one, or a pipeline rank's stages, whose names differ) on the meta device
        after `fully_shard`: they have shapes, but no values."""
        self.modules = modules
        self.settings = settings
        self._read_module()
        template = state_template(settings.optimizer, stored_dtype(settings))
        kept = {
            name: {key: _like(shard, value) for key, value in template.items()}
            for name, shard in self.shards.items()
        }
        self.optimizer = LocalOptimizer(settings.optimizer, self.shards, kept)

    def tensors(self) -> dict[str, Tensor]:
        """All of the state but the gradients, as it is trained."""
        kept = {
            optimizer_name(name, key): value
            for name, state in self.optimizer.state().items()
            for key, value in state.items()
        }
        return self.shards | self.buffers | kept

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Make these the state, uncopied but for parameters that do not divide evenly, which
        FSDP pads. A tensor without elements may be left out.

        Raises `ValueError` for a tensor that is missing or not of the shard's shape and dtype.
        """
        given = {name: _given(tensors, name, expected) for name, expected in self.tensors().items()}
        kept = {
            name: {key: given[optimizer_name(name, key)] for key in state}
            for name, state in self.optimizer.state().items()
        }
        sharded = {
            name: _distributed(given[name], parameter)
            for name, parameter in self.parameters.items()
        }
        unsharded = {name: given[name] for name in self.buffers}
        for module in self.modules:
            own = module.state_dict()
            values = {name: value for name, value in (sharded | unsharded).items() if name in own}
            module.load_state_dict(values, assign=True)
        self._read_module()
        self.optimizer = LocalOptimizer(self.settings.optimizer, self.shards, kept)

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """The local shards of the reduced gradients; parameters without one are left out."""
        return {
            name: parameter.grad.to_local()
            for name, parameter in self.parameters.items()
            if parameter.grad is not None
        }

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def squared_norm(self) -> Tensor:
        """The squared norm of the local gradients, each divided by how many ranks hold it: their
        sum over the world is that of the whole gradient. Float64, shape (), on the device."""
        gradients = self.gradients()
        norms = torch.stack(torch._foreach_norm(list(gradients.values()))).double()
        shares = [1 / self._num_copies[name] for name in gradients]
        return norms.square() @ torch.tensor(shares, dtype=torch.float64, device=norms.device)

    def state_bytes(self) -> StateBytes:
        """The sizes of the storages. Gradients exist only between compute and apply; they take
        what the parameters do, padding included, and that is told at any other time."""
        param_bytes = storage_bytes(self.shards.values())
        kept = [value for state in self.optimizer.state().values() for value in state.values()]
        return StateBytes(
            param_bytes=param_bytes,
            grad_bytes=storage_bytes(self.gradients().values()) or param_bytes,
            optimizer_bytes=storage_bytes(kept),
        )

    @torch.no_grad()
    def _read_module(self) -> None:
        named = {
            name: value
            for module in self.modules
            for name, value in module.state_dict(keep_vars=True).items()
        }
        self.parameters: dict[str, DTensor] = {
            name: value for name, value in named.items() if isinstance(value, DTensor)
        }
        self.buffers = {name: value for name, value in named.items() if name not in self.parameters}
        self.shards = {name: value.to_local() for name, value in self.parameters.items()}
        self._num_copies = {name: _num_copies(value) for name, value in self.parameters.items()}


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the storages under these tensors, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _given(tensors: Mapping[str, Tensor], name: str, expected: Tensor) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        if expected.numel():
            raise ValueError(f"{name}: this rank holds a part of it, but was given none")
        return torch.empty(expected.shape, dtype=expected.dtype)
    if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
        raise ValueError(
            f"{name}: this rank holds {tuple(expected.shape)} of {expected.dtype}, "
            f"but was given {tuple(tensor.shape)} of {tensor.dtype}"
        )
    return tensor


def _like(shard: Tensor, kept: Tensor) -> Tensor:
    return torch.empty(shard.shape if kept.ndim else (), dtype=kept.dtype, device=shard.device)


@torch.no_grad()
def _distributed(shard: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        shard,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _num_copies(parameter: DTensor) -> int:
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return prod(size for placement, size in sizes if isinstance(placement, Replicate))
