"""The weights of a run as plain PyTorch has them."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from actors.storage.checkpoint_files import find_checkpoints
from actors.storage.storage import open_storage
from pipelines.settings.errors import UserError
from pipelines.training.checkpoint.reader import Checkpoint
from pipelines.training.workload.state import OPTIMIZER


def weights_of(run: str | Path, step: int | None = None) -> dict[str, Tensor]:
    """The parameters and buffers in a run's checkpoint of a step (None: the newest), whole, on the
    host, by the names of its module's `state_dict`; a tied parameter by its first name.

    `run` is the run's folder or its URL, e.g. `runs/demo`. Raises `UserError` if it has none.
    """
    there = {saved.step: saved for saved in find_checkpoints(open_storage(str(run))).whole}
    wanted = max(there, default=None) if step is None else step
    if wanted is None or wanted not in there:
        steps = ", ".join(map(str, there)) or "none"
        raise UserError(f"{run}: has no checkpoint of step {wanted}; there are: {steps}")
    checkpoint = Checkpoint(open_storage(there[wanted].path))
    wholes = checkpoint.wholes()
    return checkpoint.read({n: one for n, one in wholes.items() if not n.startswith(OPTIMIZER)})
