"""What `run.prepare` gives back in place of a model, an optimizer, a scheduler and a loader."""

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
    """Calls go to this worker's part of the model, which is another after each re-layout.

    Before the first step it has the parameters that it was made of; from then on these are
    sharded, and no longer to be had here.
    """

    def __init__(self, declared: nn.Module, part: CalledModule) -> None:
        super().__init__()
        object.__setattr__(self, "_declared", declared)  # it is none of its children
        object.__setattr__(self, "_part", part)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        return self._part.call(*inputs, **keywords)

    def train(self, mode: bool = True) -> PreparedModel:
        if not mode and self._part.is_training:
            raise LoopMisused(
                "model.eval(): the model trains here; held-out data are evaluated between two "
                "steps, by run.evaluation(dataset, losses) before the loop"
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
                f"model.{what}: within the loop they are divided among workers; whole ones are in "
                "the run's checkpoints"
            )
        module: nn.Module = self._declared
        return module


class CalledModule:
    """Where the model's calls go: the module of the step under way."""

    def __init__(self) -> None:
        self.module: nn.Module | None = None
        self.is_training = False
        self.is_first_worker = False
        self._note: Callable[[BaseException], None] = _nobody

    def open(self, module: nn.Module, step: Step) -> None:
        """The block of a step begins, which is told what goes wrong in a call."""
        self.module, self._note, self.is_training = module, step.note, True
        self.is_first_worker = step.is_first_worker

    def close(self) -> None:
        """It is over."""
        self.module, self._note = None, _nobody

    def call(self, *inputs: Any, **keywords: Any) -> Any:
        if self.module is None:
            raise LoopMisused(
                "model(...): called outside of `with step:`, where it has no values; to look at "
                "it, use the module that was given to run.prepare, before the loop"
            )
        try:
            return self.module(*inputs, **keywords)
        except BaseException as error:
            self._note(error)
            raise


class PreparedOptimizer:
    """A script may go on calling `step` and `zero_grad`: both are done by the run, once a step."""

    def __init__(self, declared: Optimizer) -> None:
        self.declared = declared

    def step(self) -> None:
        """The run does, as soon as the step is decided."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The run does."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.declared.param_groups

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_private(name)
        raise LoopMisused(
            f"optimizer.{name}: the optimizer is the run's from run.prepare on, and its state is "
            "divided among workers"
        )


class PreparedScheduler:
    """A script may go on calling `step`: the run does it, once a step."""

    def __init__(self, declared: LRScheduler) -> None:
        self.declared = declared

    def step(self) -> None:
        """The run does."""

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_private(name)
        raise LoopMisused(
            f"scheduler.{name}: the schedule is the run's from run.prepare on; metrics.jsonl has "
            "each step's learning rate"
        )


class PreparedLoader:
    """Its length is that of an epoch in microbatches; the batches come from `step.batches()`."""

    def __init__(self, declared: DataLoader[Any]) -> None:
        self.declared = declared

    def __len__(self) -> int:
        return len(self.declared)

    @property
    def dataset(self) -> Any:
        return self.declared.dataset

    def __iter__(self) -> NoReturn:
        raise LoopMisused("the loader: a step's microbatches come from `step.batches()`")


def _nobody(error: BaseException) -> None:
    """No step is under way."""


def _refuse_private(name: str) -> None:
    """Python itself asks whether there are such, and takes this for no."""
    if name.startswith("_"):
        raise AttributeError(name)
