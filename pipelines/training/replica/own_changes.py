"""Parameters that a model changes itself while it computes, which only the run's optimizer may."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from actors.distributed.torch_private import num_changes
from pipelines.errors import UserError


class _Seen(NamedTuple):
    address: int
    changes: int
    """Autograd's count, which a change through `.data` does not change."""
    checksum: float


def checksum(value: Tensor) -> float:
    """A number that any change of the values changes; on other devices than a CPU one that most
    changes do, as reading all values on the host would take long."""
    value = value.detach()
    if value.is_cpu:
        return crc32(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return float(value.double().norm().nan_to_num(torch.inf))


class OwnChanges:
    """Finds the parameters that passes change themselves, as a momentum encoder in `forward` does.

    Such changes would happen once for each microbatch and worker, before the vote, and be lost at
    the next reshard.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Take modules before their passes. Reads all parameters once."""
        named = (item for module in modules for item in module.named_parameters())
        self._watched = dict(named)
        self._before = self._seen()

    def refuse(self) -> None:
        """Raise `UserError` if a parameter has changed since."""
        seen = self._seen()
        names = [name for name, before in self._before.items() if seen[name] != before]
        if names:
            raise UserError(
                f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}: the model changes "
                "these parameters itself within a step, as in its forward pass, which would happen "
                "once for each microbatch and worker: let a custom training loop change them "
                "behind `with step:`, or bound them by torch.nn.utils.parametrize"
            )

    def _seen(self) -> dict[str, _Seen]:
        return {
            name: _Seen(parameter.data_ptr(), num_changes(parameter), checksum(parameter))
            for name, parameter in self._watched.items()
        }
