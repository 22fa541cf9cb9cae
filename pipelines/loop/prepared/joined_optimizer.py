"""Several optimizers of one model, stepped as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class JoinedOptimizer(Optimizer):
    """Optimizers of different parameters, such as Muon for matrices and AdamW for the rest."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        """Take the members' own groups and states."""
        self._members = members
        self.param_groups = [group for member in members for group in member.param_groups]
        self.state = _JoinedState(members)  # type: ignore[assignment]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for member in self._members:
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for member in self._members:
            member.zero_grad(set_to_none)


class _JoinedState(MutableMapping[Tensor, dict[str, Any]]):
    """The state of each parameter, which its own optimizer has."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self._members = members
        self._owner_of = {
            parameter: member
            for member in members
            for group in member.param_groups
            for parameter in group["params"]
        }

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self._owner_of[parameter].state[parameter]
        return state

    def __setitem__(self, parameter: Tensor, state: dict[str, Any]) -> None:
        self._owner_of[parameter].state[parameter] = state

    def __delitem__(self, parameter: Tensor) -> None:
        del self._owner_of[parameter].state[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for member in self._members for parameter in member.state)

    def __len__(self) -> int:
        return sum(len(member.state) for member in self._members)
