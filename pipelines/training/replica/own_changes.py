"""Parameters that a model changes itself while it computes, which only the run's optimizer may."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from actors.distributed.torch_private import norms_of, num_changes
from pipelines.errors import UserError


class _Seen(NamedTuple):
    address: int
    changes: int
    """Autograd's count, which a change through `.data` does not change."""


class OwnChanges:
    """Finds the parameters that passes change themselves, as a momentum encoder in `forward` does.

    Such changes would happen once for each microbatch and worker, before the vote, and be lost at
    the next reshard.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Take modules before their passes. Reads all parameters once."""
        named = (item for module in modules for item in module.named_parameters())
        self._parameters = dict(named)
        self._before = self._seen()
        self._norms = self._current_norms()

    def refuse(self) -> None:
        """Raise `UserError` if a parameter has changed since."""
        seen = self._seen()
        norms = zip(self._parameters, self._norms, self._current_norms(), strict=True)
        changed = {name for name, before, now in norms if before != now}
        names = [n for n in self._parameters if n in changed or seen[n] != self._before[n]]
        if names:
            raise UserError(
                f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}: the model changes "
                "these parameters itself in its forward pass, which would happen once for each "
                "microbatch and worker: let a custom training loop change them behind `with "
                "step:`, or bound them by torch.nn.utils.parametrize"
            )

    def _seen(self) -> dict[str, _Seen]:
        return {
            name: _Seen(parameter.data_ptr(), num_changes(parameter))
            for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def _current_norms(self) -> list[float]:
        """NaN as infinity, so that it equals itself."""
        parameters: list[Tensor] = [*self._parameters.values()]
        norms = torch.stack(norms_of(parameters)) if parameters else torch.zeros(0)
        return norms.nan_to_num(torch.inf).tolist()
