"""The values of a script's models between two steps, and what the script changes in them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from actors.distributed.torch_private import num_changes
from pipelines.loop.state.errors import LoopMisused
from pipelines.training.models.joined_model import prefix_of
from pipelines.training.replica.own_changes import checksum


class _Noted(NamedTuple):
    tensor: Tensor
    checksum: float
    """A change through `.data` is not counted."""


class ModelValues:
    """The parameters and persistent buffers of the declared models, by their names in the run.

    Between two steps the trained values are gathered into them. What the script changes there,
    such as weights that it clips or a momentum encoder, becomes part of the run's state.
    """

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self._watched: list[Tensor] = []
        self._num_changes = 0
        self._seen: dict[str, _Noted] = {}
        self.is_suspect = False
        """Whether the script has had `.data` of a parameter since the values were noted."""
        self.kept: dict[str, Tensor] = {}
        """Copies of those that the script has changed since the latest committed step, with which
        the next step begins."""

    def add(self, model: nn.Module) -> None:
        self.models.append(model)
        self._watched += _values_of(model).values()

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Detached: they share memory with the models."""
        return {name: value.detach() for name, value in self._named().items()}

    def note(self) -> None:
        """Compare from now on with the present values."""
        self._seen = {n: _Noted(value, checksum(value)) for n, value in self._named().items()}
        self._num_changes, self.is_suspect = self._count(), False

    def note_unread(self) -> None:
        """Compare from now on with the present values, which are old ones."""
        self._num_changes = self._count()

    def is_counted(self) -> bool:
        """Whether a tensor has been changed, other than through `.data`."""
        return self._count() != self._num_changes

    @torch.no_grad()
    def keep(self) -> None:
        """Keep what has changed, and compare from now on with the present values."""
        named = self._named()
        changed = self.changed()
        self.kept |= {name: named[name].detach().clone() for name in changed}
        if changed:
            self.note()
        self.is_suspect, self._num_changes = False, self._count()

    def changed(self) -> list[str]:
        """The names of those that differ from what was noted. Raises `LoopMisused` where another
        tensor has taken a parameter's place."""
        named = self._named()
        is_suspect = self.is_suspect or self.is_counted()
        return [
            name
            for name, value in named.items()
            if self._is_other(name, value)
            and (is_suspect or not isinstance(value, nn.Parameter))
            and checksum(value) != self._seen[name].checksum
        ]

    def _is_other(self, name: str, value: Tensor) -> bool:
        """Whether a tensor may have other values. Raises `LoopMisused` for one that may not."""
        if name not in self._seen:
            return False  # a buffer that a call has made: the run has none
        old = self._seen[name].tensor
        if (value.shape, value.dtype) != (old.shape, old.dtype):
            raise LoopMisused(
                f"model.{name}: {tuple(value.shape)} of {value.dtype} in place of "
                f"{tuple(old.shape)} of {old.dtype}: these must not change in the loop"
            )
        if value is not old and isinstance(value, nn.Parameter):
            raise LoopMisused(
                f"model.{name}: another parameter in place of the model's, which no optimizer "
                f"would train: change its values, as in model.{name}.data.copy_(...)"
            )
        return True

    def _named(self) -> dict[str, Tensor]:
        return {
            prefix_of(number, len(self.models)) + name: value
            for number, model in enumerate(self.models)
            for name, value in _values_of(model).items()
        }

    def _count(self) -> int:
        return sum(map(num_changes, self._watched))


def _values_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a `state_dict` themselves, without the extra state of modules."""
    state = nn.Module.state_dict(model, keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
