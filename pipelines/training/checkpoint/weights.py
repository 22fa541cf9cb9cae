"""The weights of a run's checkpoint as a plain PyTorch state dict."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from actors.storage.checkpoint_files import find_checkpoints
from actors.storage.storage import open_storage
from pipelines.errors import UserError
from pipelines.training.checkpoint.reader import Checkpoint
from pipelines.training.workload.state import OPTIMIZER


def load_weights(run: str | Path, step: int | None = None) -> dict[str, Tensor]:
    """Read the full parameters and buffers from a run's checkpoint of a step (None: the newest).

    The tensors are on the host, by the names of the module's `state_dict`; a tied parameter has its
    first name. `run` is the run's folder or its URL, e.g. `runs/demo`. Raises `UserError` if the
    run has no such checkpoint.
    """
    by_step = {saved.step: saved for saved in find_checkpoints(open_storage(str(run))).whole}
    wanted = max(by_step, default=None) if step is None else step
    if wanted is None or wanted not in by_step:
        steps = ", ".join(map(str, by_step)) or "none"
        raise UserError(f"{run}: has no checkpoint of step {wanted}; available steps: {steps}")
    checkpoint = Checkpoint(open_storage(by_step[wanted].path))
    regions = checkpoint.full_regions()
    return checkpoint.read(
        {name: region for name, region in regions.items() if not name.startswith(OPTIMIZER)}
    )
