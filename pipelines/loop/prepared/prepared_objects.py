"""What a script has prepared: its optimizers, schedulers, scaler and the data that it trains on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from pipelines.loop.prepared.called_module import CalledModels
from pipelines.loop.prepared.data_source import DataSource, drawn_by, source_of
from pipelines.loop.prepared.loader_loop import LoaderLoop
from pipelines.loop.prepared.model import prepare_model
from pipelines.loop.prepared.optimizer_factory import ScriptOptimizerFactory
from pipelines.loop.prepared.refusals import refuse_distributed, refuse_prepared
from pipelines.loop.prepared.script_moment import Moment
from pipelines.loop.prepared.wrappers import (
    PreparedLoader,
    PreparedOptimizer,
    PreparedScaler,
    PreparedScheduler,
)
from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.state.loss_scaler import LossScaler
from pipelines.training.workload.clipping import Clipping


class PreparedObjects:
    """The objects of `run.prepare`, and what their wrappers ask the run for."""

    def __init__(
        self, models: CalledModels, gather_optimizer: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        """`gather_optimizer` gathers the whole optimizer state by its names in the run."""
        self._models, self._at = models, models.at
        self._gather_optimizer = gather_optimizer
        self._at.clip = self._clip
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[LRScheduler] = []
        self.scaler: LossScaler | None = None
        self.source: DataSource | None = None
        self.loop = LoaderLoop(self._at)
        self.factory: ScriptOptimizerFactory | None = None
        """Of all optimizers, once the loop has declared them."""

    def take(self, item: Any) -> Any:
        """The wrapper of an object. Raises `LoopMisused` for one that cannot be prepared."""
        refuse_prepared(item)
        refuse_distributed(item)
        match item:
            case nn.Module():
                return prepare_model(item, self._models)
            case Optimizer():
                self.optimizers.append(item)
                note_step, whole = partial(self._note_step, item), partial(self._whole_state, item)
                return PreparedOptimizer(item, note_step, whole)
            case LRScheduler():
                self.schedulers.append(item)
                return PreparedScheduler(item, partial(self._before_schedule, item.optimizer))
            case GradScaler():
                _refuse_second(self.scaler, "scaler")
                self.scaler = LossScaler(item)
                return PreparedScaler(item, self.scaler, self._at)
            case DataLoader():
                _refuse_second(self.source, "loader")
                self.source = source_of(item)
                return PreparedLoader(item, self._at, self.loop)
        raise LoopMisused(
            f"run.prepare: cannot prepare {type(item).__name__}; pass a model, an optimizer, "
            "learning-rate schedulers, a GradScaler, and a DataLoader"
        )

    def draw(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Take what a function draws in place of a loader. Raises `LoopMisused` for a second one,
        and for a function that has another state."""
        _refuse_second(self.source, "loader")
        self.source = drawn_by(function, arguments)

    def split(self, microbatches: int) -> None:
        """Let each microbatch be a part of what is one now."""
        refuse_counts(microbatches=microbatches)
        if self.source is not None:
            self.source = self.source.split(microbatches)

    def begin_epochs(
        self, microbatches: int, is_split: bool = False, steps_per_epoch: int | None = None
    ) -> int:
        """The batches of an epoch, which has whole steps from now on."""
        refuse_counts(microbatches=microbatches)
        if is_split:
            self.split(microbatches)
        if steps_per_epoch is not None:
            refuse_counts(steps_per_epoch=steps_per_epoch)
            return steps_per_epoch
        if self.source is None:
            return 1
        batch = self.source.microbatch * microbatches
        self.source = self.source.in_whole_steps(batch)
        return self.source.epoch_size // batch

    def _note_step(self, optimizer: Optimizer) -> None:
        """Called where a script would step this optimizer."""
        if len(self.optimizers) > 1 and self._at.moment is Moment.BETWEEN_STEPS:
            raise LoopMisused(
                "optimizer.step() outside of `with step:`: with several optimizers call it in the "
                "block, so that the run knows which of them step"
            )
        self._at.note_optimizer_step()
        if self.factory is not None and self._at.moment is Moment.IN_STEP:
            self.factory.values.note_step(optimizer)
            if self._at.is_stepped and self.factory.all_step and self._at.step is not None:
                self._at.step.close()

    def _clip(self, model: nn.Module, clipping: Clipping) -> Tensor:
        """The script clips all gradients of a model in the body of a step."""
        if [*self._models.declared] != [model]:
            raise LoopMisused(
                "clip_grad_norm_ of one of several models, or of a part of one: the run clips the "
                "gradients of all together: prepare one model, or delete this line"
            )
        assert self.factory is not None, "a step without a loop"
        self.factory.clip(clipping)
        self._at.norm = norm = torch.zeros(()) if self._at.norm is None else self._at.norm
        return norm

    def _whole_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The `state_dict` of an optimizer."""
        if self._at.moment is Moment.IN_STEP:
            raise LoopMisused(
                "optimizer.state_dict: within a step it is sharded over the workers; use it "
                "between two steps"
            )
        if self.factory is None or self._at.moment is Moment.BEFORE_LOOP:
            return optimizer.state_dict()
        return self.factory.state_dict(optimizer, self._gather_optimizer())

    def _before_schedule(self, optimizer: Optimizer) -> None:
        self._at.refuse_unread()
        if self.factory is not None and self._at.moment is Moment.IN_STEP:
            self.factory.values.take(optimizer)


def refuse_counts(**counts: int) -> None:
    """Raise `LoopMisused` for what is no whole number from 1 on."""
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise LoopMisused(f"run.steps: {name}={count} must be a whole number from 1 on")


def _refuse_second(known: Any, kind: str) -> None:
    if known is not None:
        advice = "; for held-out samples use run.evaluation(dataset, losses)"
        advice = advice if kind == "loader" else ""
        raise LoopMisused(f"run.prepare: a second {kind}; a run trains with one{advice}")
