"""What `run.prepare` refuses: objects that another library distributes, or that no run can keep."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pipelines.errors import UserError
from pipelines.loop.prepared.optimizer_factory import ScriptOptimizerFactory
from pipelines.loop.prepared.wrappers import (
    PreparedLoader,
    PreparedOptimizer,
    PreparedScaler,
    PreparedScheduler,
)
from pipelines.loop.state.errors import LoopMisused
from pipelines.reading.foreign_datasets import refuse_foreign
from pipelines.training.custom.optimizer_checks import refuse_other_state, refuse_unfit
from pipelines.training.workload.state import trained_dims

DISTRIBUTED = (DistributedDataParallel, DataParallel, FullyShardedDataParallel, FSDPModule)
MAX_SCHEDULED = 1_000
"""How often a scheduler is stepped at most on trial."""


def refuse_unkeepable(factory: ScriptOptimizerFactory, model: nn.Module, steps: int) -> None:
    """Step the optimizers on small tensors, and the schedulers. Raises `LoopMisused` if a run
    cannot keep their state, or a parameter."""
    try:
        refuse_other_state(model)
        factory.values.try_schedulers(min(steps, MAX_SCHEDULED))
        refuse_unfit(factory, trained_dims(model))
    except LoopMisused:
        raise
    except UserError as error:
        raise LoopMisused(f"run.prepare: {error}") from error


def refuse_prepared(item: object) -> None:
    """Raise `LoopMisused` for what an execution of the function before has prepared."""
    wrappers = (PreparedOptimizer, PreparedScheduler, PreparedScaler, PreparedLoader)
    if isinstance(item, wrappers):
        kind = type(item.declared).__name__
        raise LoopMisused(
            f"run.prepare: the {kind} was prepared before: the function runs several times in a "
            "process, so make model, optimizer and loader in it, not at the top of the file"
        )


def refuse_distributed(item: object) -> None:
    """Raise `LoopMisused` for an object that is distributed over processes already."""
    try:
        refuse_foreign(item)
        refuse_foreign(getattr(item, "dataset", None))
    except UserError as error:
        raise LoopMisused(f"run.prepare: {error}") from None
    kind = type(item)
    if kind.__module__.partition(".")[0] == "accelerate":
        raise LoopMisused(
            f"run.prepare: {kind.__name__} is of Accelerate: pass what accelerator.prepare was "
            "given, and drop the Accelerator (docs/from-accelerate.md)"
        )
    if isinstance(item, DISTRIBUTED):
        names = [known.__name__ for known in DISTRIBUTED if isinstance(item, known)]
        name = "fully_shard" if names[-1] == "FSDPModule" else names[0]
        raise LoopMisused(
            f"run.prepare: the model is wrapped by {name}: pass the model itself; the run "
            "distributes it, see --layout"
        )
