"""What the body of a step changes in the model outside of its forward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from actors.distributed.torch_private import num_changes
from pipelines.loop.state.errors import LoopMisused


class BodyChanges:
    """Refuses changes of buffers before, between and behind the passes of a step.

    Each microbatch begins with the buffers of the step before, so such changes would be lost.
    """

    def __init__(self, buffers: Callable[[], Mapping[str, Tensor]]) -> None:
        """`buffers` returns those that this worker's part of the model has now."""
        self._buffers = buffers
        self.note()

    def note(self) -> None:
        """What has changed until now has been changed by a pass."""
        self._noted = self._counted()

    def refuse(self) -> None:
        """Raise `LoopMisused` if a buffer has changed since."""
        now, noted = self._counted(), self._noted
        changed = [name for name in noted.keys() & now.keys() if now[name] != noted[name]]
        if changed:
            raise LoopMisused(
                f"the body changes the buffer {min(changed)} of the model outside of a forward "
                "pass: change it behind the block, under `if step.committed:`"
            )

    def _counted(self) -> dict[str, tuple[int, int]]:
        return {name: (id(value), num_changes(value)) for name, value in self._buffers().items()}
