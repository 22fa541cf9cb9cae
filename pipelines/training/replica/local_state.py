"""The local tensors of one rank: shards of parameters, buffers, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from actors.distributed.torch_private import norms_of
from actors.runtime.program import StateBytes
from pipelines.settings import TrainSettings
from pipelines.training.sharding.sharded import Sharded, storage_bytes
from pipelines.training.workload.optimizer import (
    LocalOptimizer,
    OptimizerFactory,
    state_shape,
    state_templates,
)
from pipelines.training.workload.state import (
    NUMBER_SHAPES,
    SCRIPT,
    buffers,
    optimizer_name,
    stored_dtype,
)


class LocalState:
    """Plain tensors by logical name, which share memory with modules and optimizer."""

    def __init__(
        self,
        sharded: Sharded,
        settings: TrainSettings,
        optimizer_factory: OptimizerFactory,
        device: torch.device,
        whole_parameters: Collection[str] = (),
        tied: Collection[str] = (),
    ) -> None:
        """Take modules on the meta device: shapes without values. The `whole_parameters` are those
        of the workload; the `tied` ones lie on two pipeline stages."""
        self.sharded = sharded
        self.optimizer_factory = optimizer_factory
        self.device = device
        self.whole_parameters = whole_parameters
        self.tied = tied
        self._read_modules()
        num_dims = {name: shard.ndim for name, shard in self._trained().items()}
        templates = state_templates(optimizer_factory, num_dims, stored_dtype(settings))
        optimizer_state = {
            name: {key: _like(self.shards[name], value) for key, value in template.items()}
            for name, template in templates.items()
            if name not in sharded.elsewhere
        }
        self.optimizer = LocalOptimizer(optimizer_factory, self._trained(), optimizer_state)
        self._elsewhere = {
            optimizer_name(name, key): self.shards[name].new_empty(
                (0, *state_shape(value, whole_shape)[1:]), dtype=value.dtype
            )
            for name, whole_shape in sharded.elsewhere.items()
            for key, value in templates[name].items()
        }
        """Empty parts of the state of parameters that other ranks own."""
        self.script = {
            SCRIPT + name: value.to(device, copy=True)
            for name, value in optimizer_factory.script_state.items()
        }
        """What a script changes, replicated; see `OptimizerFactory.script_state`."""

    def tensors(self) -> dict[str, Tensor]:
        """The live state without the gradients."""
        whole = self.whole_parameters
        optimizer_state = {
            optimizer_name(name, key): value.view(value.shape or NUMBER_SHAPES[name in whole])
            for name, state in self.optimizer.state().items()
            for key, value in state.items()
        }
        return self.shards | self.buffers | optimizer_state | self._elsewhere | self.script

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Make these tensors the state, without copies where the sharding allows it.

        A tensor without elements may be omitted. Raises `ValueError` for a tensor that is missing
        or has a shape or dtype other than the shard's.
        """
        checked = {
            name: _checked_tensor(tensors, name, expected)
            for name, expected in self.tensors().items()
        }
        optimizer_state = {
            name: {
                key: checked[optimizer_name(name, key)].view(value.shape)
                for key, value in state.items()
            }
            for name, state in self.optimizer.state().items()
        }
        self.sharded.adopt(
            {name: checked[name] for name in self.shards},
            {name: checked[name] for name in self.buffers},
        )
        self._read_modules()
        for name, state in optimizer_state.items():
            device = self.shards[name].device
            optimizer_state[name] = {key: value.to(device) for key, value in state.items()}
        self.optimizer = LocalOptimizer(self.optimizer_factory, self._trained(), optimizer_state)
        self._elsewhere = {name: checked[name] for name in self._elsewhere}
        self.script = {name: checked[name] for name in self.script}

    def gradients(self) -> dict[str, Tensor]:
        """The local shards of the reduced gradients, without parameters that have none."""
        return self.sharded.gradients()

    def drop_gradients(self) -> None:
        self.sharded.drop_gradients()

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Step the optimizer with these gradients; see `LocalOptimizer.step`."""
        self.optimizer.step(gradients)
        self.sharded.after_step()

    def squared_norm(self) -> Tensor:
        """The squared norm of the local gradients, each divided by its number of copies.

        The sum over the world is the squared norm of the full gradient. Float64, shape (), on the
        device.
        """
        squares, weights = self._squares(self.gradients())
        return squares @ weights

    def squared_norms(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """As `squared_norm`, for each of some tensors with the parameters' names and shapes."""
        squares, weights = self._squares(tensors)
        return squares * weights

    def state_bytes(self) -> StateBytes:
        """The bytes of the storages on the device.

        Gradients exist only between compute and apply; at other times this is their expected size.
        """
        optimizer_state = [
            value for state in self.optimizer.state().values() for value in state.values()
        ]
        gradients = self.gradients()
        return StateBytes(
            param_bytes=storage_bytes(self.sharded.resident_tensors(), self.device),
            grad_bytes=storage_bytes(gradients.values(), self.device)
            if gradients
            else self.sharded.gradient_bytes(),
            optimizer_bytes=storage_bytes(optimizer_state, self.device),
        )

    def _squares(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Squared norms, and the reciprocals of the numbers of ranks that hold each tensor."""
        if not tensors:  # a step may train nothing that this rank holds
            return (torch.zeros(0, dtype=torch.float64, device=self.device),) * 2
        squares = torch.stack(norms_of(list(tensors.values()))).double().square()
        weights = [1 / self._num_copies[name] for name in tensors]
        return squares, torch.tensor(weights, dtype=torch.float64, device=squares.device)

    def trained_ties(self) -> list[str]:
        """The tied parameters that this rank trains, and whose gradients it has."""
        here = self._trained().keys() - self.sharded.elsewhere.keys()
        return [name for name in self.tied if name in here]

    def _trained(self) -> dict[str, Tensor]:
        """The shards of parameters that are not frozen."""
        return {name: shard for name, shard in self.shards.items() if name in self._wants_gradient}

    def _read_modules(self) -> None:
        self.shards = self.sharded.shards()
        self.buffers = {
            name: value for module in self.sharded.modules for name, value in buffers(module)
        }
        self._num_copies = {
            name: 2 * number if name in self.tied else number
            for name, number in self.sharded.num_copies().items()
        }
        self._wants_gradient = {
            name
            for module in self.sharded.modules
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }


def _checked_tensor(tensors: Mapping[str, Tensor], name: str, expected: Tensor) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        if expected.numel():
            raise ValueError(f"{name}: no tensor given, but this rank holds a shard of it")
        return torch.empty(expected.shape, dtype=expected.dtype)
    if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
        raise ValueError(
            f"{name}: this rank holds shape {tuple(expected.shape)} of {expected.dtype}, "
            f"but got {tuple(tensor.shape)} of {tensor.dtype}"
        )
    return tensor


def _like(shard: Tensor, template: Tensor) -> Tensor:
    shape = state_shape(template, shard.shape)
    return torch.empty(shape, dtype=template.dtype, device=shard.device)
