"""The run as a script sees it: what it prepares, and the steps that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from pipelines.loop.declaration import Declaration, EvaluationSetup
from pipelines.loop.errors import LoopMisused
from pipelines.loop.prepared import (
    CalledModule,
    PreparedLoader,
    PreparedModel,
    PreparedOptimizer,
    PreparedScheduler,
)
from pipelines.loop.step import Step
from pipelines.loop.stepping import AsPrepared


class Run:
    """Given to the script's function: `prepare` what it trains with, then loop over `steps`."""

    def __init__(self, begin: Callable[[Declaration], Iterator[Step]], part: CalledModule) -> None:
        """`begin` gives the steps of what was declared; `part` is where the model's calls go."""
        self._begin = begin
        self._part = part
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._scheduler: LRScheduler | None = None
        self._loader: DataLoader[Any] | None = None
        self._evaluation: EvaluationSetup | None = None

    def prepare(self, *objects: Any) -> Any:
        """Take a model, its optimizer, a learning-rate scheduler and a loader, in any order, at
        once or one by one; what comes back, in the same order, stands for them in the loop.

        The loader's `batch_size` is that of a microbatch. The schedule counts in steps. Raises
        `LoopMisused` for what cannot follow a run through changes of its workers.
        """
        prepared = tuple(self._prepared(one) for one in objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def evaluation(
        self,
        dataset: Dataset[Any],
        losses: Callable[[nn.Module, Any], Any],
        **metrics: Callable[[nn.Module, Any], Any],
    ) -> None:
        """Evaluate these held-out samples after every `eval_every` steps: `losses(model, batch)`
        is the mean loss over one microbatch, and each of the metrics a mean likewise."""
        self._evaluation = EvaluationSetup(dataset, losses, metrics)

    def steps(
        self, num_steps: int, microbatches: int = 8, max_grad_norm: float | None = None
    ) -> Iterator[Step]:
        """The steps that are left of so many, from 1 on, each to be computed within `with step:`.

        A step is the mean over so many microbatches, whatever the number of workers that share
        them; its gradient's norm is clipped to `max_grad_norm`. What a script does after its last
        step is not done.
        """
        return self._begin(self._declared(num_steps, microbatches, max_grad_norm))

    def print(self, *values: Any) -> None:
        """Print within the loop, on one worker of all; see `elastic logs`."""
        if self._part.is_first_worker:
            print(*values, flush=True)

    def _declared(
        self, num_steps: int, microbatches: int, max_grad_norm: float | None
    ) -> Declaration:
        for name, count in (("num_steps", num_steps), ("microbatches", microbatches)):
            if count < 1:
                raise LoopMisused(f"run.steps: {name}={count}, which is not at least 1")
        model, optimizer, loader = self._model, self._optimizer, self._loader
        if model is None or optimizer is None or loader is None:
            kinds = {"model": model, "optimizer": optimizer, "loader": loader}
            missing = [kind for kind, one in kinds.items() if one is None]
            raise LoopMisused(f"run.steps: give run.prepare the {' and the '.join(missing)} first")
        names = {parameter: name for name, parameter in model.named_parameters()}
        assert loader.batch_size is not None
        return Declaration(
            model,
            AsPrepared(optimizer, self._scheduler, names, max_grad_norm),
            loader.dataset,
            loader.collate_fn,
            loader.batch_size,
            microbatches,
            num_steps,
            self._evaluation,
        )

    def _prepared(self, one: Any) -> Any:
        match one:
            case nn.Module():
                _refuse_second(self._model, "model")
                self._model = one
                return PreparedModel(one, self._part)
            case Optimizer():
                _refuse_second(self._optimizer, "optimizer")
                self._optimizer = one
                return PreparedOptimizer(one)
            case LRScheduler() if not isinstance(one, ReduceLROnPlateau):
                _refuse_second(self._scheduler, "scheduler")
                self._scheduler = one
                return PreparedScheduler(one)
            case DataLoader():
                _refuse_second(self._loader, "loader")
                _refuse_other_order(one)
                self._loader = one
                return PreparedLoader(one)
        raise LoopMisused(
            f"run.prepare: {type(one).__name__}; it takes a model, an optimizer, a learning-rate "
            "scheduler that needs no metric, and a DataLoader"
        )


def _refuse_second(known: Any, kind: str) -> None:
    if known is not None:
        told = "; of held-out samples: run.evaluation(dataset, losses)" if kind == "loader" else ""
        raise LoopMisused(f"run.prepare: a second {kind}; a run trains with one{told}")


def _refuse_other_order(loader: DataLoader[Any]) -> None:
    """Which samples a step has is a function of the step's number, and of nothing else."""
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise LoopMisused(
            "run.prepare: the loader's dataset is no map-style one; it needs __len__ and "
            "__getitem__, so that any worker can read any sample"
        )
    sampler = loader.sampler
    is_plain = isinstance(sampler, RandomSampler) and loader.batch_size is not None
    if not is_plain or sampler.replacement or sampler.num_samples != len(dataset):
        raise LoopMisused(
            "run.prepare: the loader has an order of its own; samples come in a shuffled order "
            "that all workers know: say shuffle=True, without a sampler (one of held-out samples: "
            "run.evaluation(dataset, losses))"
        )
    if not len(dataset):
        raise LoopMisused("run.prepare: the loader's dataset is empty")
