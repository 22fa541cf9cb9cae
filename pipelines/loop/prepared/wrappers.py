"""Wrappers that `run.prepare` returns for an optimizer, a scheduler, a scaler and a loader."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from pipelines.loop.prepared.loader_loop import LoaderLoop
from pipelines.loop.prepared.script_moment import Moment, ScriptMoment
from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.state.loss_scaler import LossScaler

ASKED_BY_SCALERS = "_step_supports_amp_scaling"
"""An attribute of optimizers for which a `GradScaler` asks before it steps one."""


class PreparedOptimizer:
    """Wrapper of an optimizer: the run steps it when the step commits, with the hyperparameters
    that its groups have when the script calls `step`."""

    def __init__(
        self,
        declared: Optimizer,
        take: Callable[[], None],
        whole_state: Callable[[], dict[str, Any]],
    ) -> None:
        self.declared = declared
        self._take = take
        self._whole_state = whole_state

    def step(self, closure: object = None) -> None:
        """Fixes the hyperparameters of the present step; the run steps when it commits."""
        if closure is not None:
            raise LoopMisused(
                "optimizer.step(closure): a run computes the loss once a step: compute it within "
                "`with step:`, and call optimizer.step() without arguments"
            )
        self._take()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the run zeroes the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Between two steps: the whole state, gathered from all workers, as torch saves it."""
        return self._whole_state()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.declared.param_groups

    def __getattr__(self, name: str) -> NoReturn:
        if name == ASKED_BY_SCALERS:
            raise LoopMisused("a GradScaler: pass it to run.prepare, too, and use what it returns")
        _refuse_private(name)
        raise LoopMisused(
            f"optimizer.{name}: not available after run.prepare: the run owns the optimizer, "
            "shards its state over the workers, and saves and restores it with its checkpoints: "
            "delete this line"
        )


class PreparedScaler:
    """Wrapper of a `GradScaler`, whose scale is part of the run's state.

    The run unscales the gradients, skips a step in which one of them is not finite, and updates the
    scale when the step commits.
    """

    def __init__(self, declared: GradScaler, scaler: LossScaler, at: ScriptMoment) -> None:
        self.declared = declared
        self._scaler = scaler
        self._at = at

    def scale(self, outputs: Tensor) -> Tensor:
        """The loss times the scale, to be passed to `step.backward`."""
        if self._at.moment is Moment.IN_STEP:
            self._scaler.used, self._at.loss = self._scaler.scale, outputs
        return outputs * self._scaler.scale if self._scaler.is_enabled else outputs

    def unscale_(self, optimizer: Any) -> None:
        """Does nothing: the run unscales the gradients before it clips them."""

    def step(self, optimizer: Any, *arguments: Any, **keywords: Any) -> None:
        """As `optimizer.step()`."""
        optimizer.step()

    def update(self, new_scale: float | None = None) -> None:
        """Does nothing without `new_scale`: the run updates the scale."""
        if new_scale is not None:
            self._scaler.scale = float(new_scale)

    def get_scale(self) -> float:
        return self._scaler.scale

    def is_enabled(self) -> bool:
        return self._scaler.is_enabled


class PreparedScheduler:
    """Wrapper of a scheduler, whose state is part of the run's; the script steps it."""

    def __init__(self, declared: LRScheduler, before_step: Callable[[], None]) -> None:
        self.declared = declared
        self._before_step = before_step

    def step(self, *arguments: Any, **keywords: Any) -> None:
        """Step the schedule; within a step it counts from the next step on."""
        self._before_step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "scheduler before optimizer.step()"
            self.declared.step(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        _refuse_private(name)
        return getattr(self.declared, name)


class PreparedLoader:
    """Wrapper of a loader: in an epoch of `run.range` the script's loop over it trains.

    Else its length is an epoch in microbatches, and it is iterated only outside of the steps, e.g.
    by `torch.optim.swa_utils.update_bn`.
    """

    def __init__(self, declared: DataLoader[Any], at: ScriptMoment, loop: LoaderLoop) -> None:
        self.declared = declared
        self._at = at
        self._loop = loop

    def __len__(self) -> int:
        num_steps = self._loop.num_steps
        return len(self.declared) if num_steps is None else num_steps

    def __iter__(self) -> Iterator[Any]:
        if self._at.moment is Moment.IN_STEP:
            raise LoopMisused("the loader cannot be iterated: loop over `step.batches()` instead")
        return self._loop.batches() if self._loop.is_due else iter(self.declared)

    def __getattr__(self, name: str) -> Any:
        """Those of the script's loader: `sampler.set_epoch`, for example, has no effect, as the run
        counts epochs itself."""
        _refuse_private(name)
        return getattr(self.declared, name)


def _refuse_private(name: str) -> None:
    """Raise `AttributeError` for private names, whose existence Python itself probes."""
    if name.startswith("_"):
        raise AttributeError(name)
