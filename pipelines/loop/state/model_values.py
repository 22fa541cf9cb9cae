"""The values of a script's models between two steps, and what the script changes in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from actors.distributed.torch_private import norms_of, num_changes
from pipelines.loop.state.errors import LoopMisused
from pipelines.training.models.joined_model import prefix_of


class _Noted(NamedTuple):
    tensor: Tensor
    changes: int
    norm: float
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
        self.kept: set[str] = set()
        """The names of those that the script has changed since the latest committed step, and
        that the next step begins with."""

    def add(self, model: nn.Module) -> None:
        self.models.append(model)
        self._watched += _values_of(model).values()

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Detached: they share memory with the models."""
        return {name: value.detach() for name, value in self._named().items()}

    def kept_tensors(self) -> dict[str, Tensor]:
        tensors = self.tensors() if self.kept else {}
        return {name: tensors[name] for name in sorted(self.kept)}

    def note(self) -> None:
        """Compare from now on with the present values."""
        self._seen, self._num_changes = self._read(), self._count()

    def note_unread(self) -> None:
        """Compare from now on with the present values, which are old ones."""
        self._num_changes = self._count()

    def is_counted(self) -> bool:
        """Whether a tensor has been changed, other than through `.data`."""
        return self._count() != self._num_changes

    def keep(self) -> None:
        """Keep what has changed, and compare from now on with the present values."""
        now = self._read()
        self.kept.update(self._changed(now))
        self._seen, self._num_changes = now, self._count()

    def changed(self) -> list[str]:
        """The names of those that differ from what was noted. Raises `LoopMisused` where another
        tensor has taken a parameter's place."""
        return self._changed(self._read())

    def _changed(self, now: Mapping[str, _Noted]) -> list[str]:
        seen = self._seen
        changed = [name for name, value in now.items() if value[1:] != seen[name][1:]]
        for name, value in now.items():
            before = seen[name].tensor
            if value.tensor is before:
                continue
            if (value.tensor.shape, value.tensor.dtype) != (before.shape, before.dtype):
                raise LoopMisused(
                    f"model.{name}: {tuple(value.tensor.shape)} of {value.tensor.dtype} in place "
                    f"of {tuple(before.shape)} of {before.dtype}: these must not change in the loop"
                )
            if isinstance(value.tensor, nn.Parameter):
                raise LoopMisused(
                    f"model.{name}: another parameter in place of the model's, which no optimizer "
                    f"would train: change its values, as in model.{name}.data.copy_(...)"
                )
            changed.append(name)
        return changed

    def _named(self) -> dict[str, Tensor]:
        return {
            prefix_of(number, len(self.models)) + name: value
            for number, model in enumerate(self.models)
            for name, value in _values_of(model).items()
        }

    def _count(self) -> int:
        return sum(map(num_changes, self._watched))

    @torch.no_grad()
    def _read(self) -> dict[str, _Noted]:
        named = self._named()
        values = [value.detach() for value in named.values()]
        values = [value if value.is_floating_point() else value.double() for value in values]
        norms = [norm.double() for norm in norms_of(values)] if values else []
        read = torch.stack(norms).nan_to_num(torch.inf).tolist() if norms else []
        pairs = zip(named.items(), read, strict=True)
        return {name: _Noted(value, num_changes(value), norm) for (name, value), norm in pairs}


def _values_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a `state_dict` themselves, without the extra state of modules."""
    state = nn.Module.state_dict(model, keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
