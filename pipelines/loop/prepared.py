"""Wrappers that `run.prepare` returns for a model, an optimizer, a scheduler and a loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from pipelines.loop.errors import LoopMisused
from pipelines.loop.step import Step


class PreparedModel(nn.Module):
    """Wrapper of a model: a call runs this worker's current part of it, which a reshard replaces.

    Before the first step it gives access to the original parameters. From then on they are sharded
    and not accessible here.
    """

    def __init__(self, declared: nn.Module, part: CalledModule) -> None:
        super().__init__()
        object.__setattr__(self, "_declared", declared)  # not registered as a submodule
        object.__setattr__(self, "_part", part)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        return self._part.call(*inputs, **keywords)

    def train(self, mode: bool = True) -> PreparedModel:
        if not mode and self._part.is_training:
            raise LoopMisused(
                "model.eval(): not possible within a step; declare held-out data with "
                "run.evaluation(dataset, losses) before the loop, and the run evaluates them "
                "between steps"
            )
        return self

    def named_parameters(self, *arguments: Any, **keywords: Any) -> Any:
        return self._before_training("parameters").named_parameters(*arguments, **keywords)

    def named_buffers(self, *arguments: Any, **keywords: Any) -> Any:
        return self._before_training("buffers").named_buffers(*arguments, **keywords)

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        return self._before_training("state_dict").state_dict(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part.module or self._declared, name)

    def _before_training(self, what: str) -> nn.Module:
        if self._part.is_training:
            raise LoopMisused(
                f"model.{what}: within the loop these are sharded over the workers; read whole "
                "ones from the run's checkpoints"
            )
        module: nn.Module = self._declared
        return module


class CalledModule:
    """The target of the model's calls: this worker's module in the current step."""

    def __init__(self) -> None:
        self.module: nn.Module | None = None
        self.is_training = False
        self.is_first_worker = False
        self._note: Callable[[BaseException], None] = _ignore

    def open(self, module: nn.Module, step: Step) -> None:
        """Enter a step, which is notified of errors in calls."""
        self.module, self._note, self.is_training = module, step.note, True
        self.is_first_worker = step.is_first_worker

    def close(self) -> None:
        """Leave the step."""
        self.module, self._note = None, _ignore

    def call(self, *inputs: Any, **keywords: Any) -> Any:
        if self.module is None:
            raise LoopMisused(
                "model(...): called outside of `with step:`, where it has no values; before the "
                "loop, call the module that was passed to run.prepare"
            )
        try:
            return self.module(*inputs, **keywords)
        except BaseException as error:
            self._note(error)
            raise


class PreparedOptimizer:
    """Wrapper of an optimizer: the run steps it, so `step` and `zero_grad` do nothing."""

    def __init__(self, declared: Optimizer) -> None:
        self.declared = declared

    def step(self) -> None:
        """Does nothing: the run steps the optimizer when the step commits."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the run zeroes the gradients."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.declared.param_groups

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_private(name)
        raise LoopMisused(
            f"optimizer.{name}: not available after run.prepare: the run owns the optimizer and "
            "shards its state over the workers"
        )


class PreparedScheduler:
    """Wrapper of a scheduler: the run steps it once a step, so `step` does nothing."""

    def __init__(self, declared: LRScheduler) -> None:
        self.declared = declared

    def step(self) -> None:
        """Does nothing: the run steps the schedule."""

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_private(name)
        raise LoopMisused(
            f"scheduler.{name}: not available after run.prepare: the run owns the schedule; "
            "metrics.jsonl has each step's learning rate"
        )


class PreparedLoader:
    """Wrapper of a loader: its length is an epoch in microbatches; it cannot be iterated."""

    def __init__(self, declared: DataLoader[Any]) -> None:
        self.declared = declared

    def __len__(self) -> int:
        return len(self.declared)

    @property
    def dataset(self) -> Any:
        return self.declared.dataset

    def __iter__(self) -> NoReturn:
        raise LoopMisused("the loader cannot be iterated: loop over `step.batches()` instead")


def _ignore(error: BaseException) -> None:
    """No step needs to know of the error."""


def _refuse_private(name: str) -> None:
    """Raise `AttributeError` for private names, whose existence Python itself probes."""
    if name.startswith("_"):
        raise AttributeError(name)
