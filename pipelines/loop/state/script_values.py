"""The numbers that a script's code changes from step to step, as one vector of the run's state."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from itertools import repeat
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.state.loss_scaler import LossScaler
from pipelines.training.workload.clipping import Clipping

PARAMETERS = "params"


class ScriptValues:
    """The hyperparameters of an optimizer's groups, the state of its schedulers, the loss scale.

    The script changes them by hand or by `scheduler.step()`, on each worker alike. The optimizer
    gets those of the moment at which the script would step it.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[LRScheduler],
        scaler: LossScaler | None = None,
    ) -> None:
        self._optimizers = optimizers
        self._schedulers = schedulers
        self.scaler = scaler or LossScaler()
        self.initial = self._read()
        """All numbers at step 0."""
        self.kept = list(self.initial)
        """All numbers at the beginning of the present step, in an order that does not change."""
        self._taken: dict[int, list[dict[str, Any]]] = {}
        """The hyperparameters of each group of an optimizer in the present step, by the number of
        the optimizer, once they are known."""
        self._stepped: set[int] = set()
        """The numbers of the optimizers that the script has stepped in the present step."""
        self.clipping: Clipping | None = None
        """How the script clips the gradients of the present step, if it does so in the body."""

    def keep(self) -> None:
        """Begin the next step with the present numbers. Raises `LoopMisused` for more or fewer."""
        numbers = self._read()
        self._refuse_change(len(numbers))
        self.kept, self.scaler.used = numbers, 1.0
        self._forget_step()

    def live(self) -> list[float]:
        """All numbers now."""
        return self._read()

    def restore(self, numbers: Sequence[float]) -> None:
        """Begin a step again, or in another worker's place, with its numbers."""
        self._refuse_change(len(self._read()))
        remaining = iter(numbers)
        for group in self._groups():
            group |= _replaced(_hyperparameters(group), remaining)
        for scheduler in self._schedulers:
            scheduler.load_state_dict(_replaced(scheduler.state_dict(), remaining))
        self.scaler.load(list(remaining))
        self._forget_step()

    def try_schedulers(self, num_steps: int) -> None:
        """Step each scheduler so often, and undo it. Raises `LoopMisused` for one with state that
        the run cannot keep, and what its first step raises."""
        for scheduler in self._schedulers:
            groups = [*map(_hyperparameters, self._groups())]
            state = deepcopy(scheduler.state_dict())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # "scheduler before optimizer.step()"
                _advance(scheduler, num_steps)
            after = deepcopy(scheduler.state_dict())
            scheduler.load_state_dict(state)
            for group, before in zip(self._groups(), groups, strict=True):
                group |= before
            for key in {**state, **after}:
                if not _alike(state.get(key), after.get(key)):
                    raise LoopMisused(
                        f"the scheduler {type(scheduler).__name__} changes {key} of its state, of "
                        "which the run keeps numbers only, and as many as at first: compute the "
                        "rate from last_epoch"
                    )

    def take(self, optimizer: Optimizer) -> None:
        """Fix the hyperparameters that an optimizer has in the present step, unless they are."""
        groups = optimizer.param_groups
        self._taken.setdefault(self._optimizers.index(optimizer), [*map(_hyperparameters, groups)])

    def note_step(self, optimizer: Optimizer) -> None:
        """The script steps an optimizer: the hyperparameters of this moment count, though a
        scheduler may have been stepped before."""
        number = self._optimizers.index(optimizer)
        if number not in self._stepped:
            self._stepped.add(number)
            self._taken.pop(number, None)
            self.take(optimizer)

    @property
    def stepped(self) -> frozenset[int]:
        """The numbers of the optimizers that step in the present step: all, if the script has
        stepped none."""
        return frozenset(self._stepped or range(len(self._optimizers)))

    def clip(self, clipping: Clipping) -> None:
        """The script clips the gradients in the body. Raises `LoopMisused` for the norm after the
        elements, which the run clips last."""
        known = self.clipping or Clipping()
        if clipping.max_norm is not None and known.max_value is not None:
            raise LoopMisused(
                "clip_grad_norm_ after clip_grad_value_: the run clips the norm first: turn them "
                "around"
            )
        self.clipping = Clipping(
            clipping.max_norm or known.max_norm, clipping.max_value or known.max_value
        )

    def _forget_step(self) -> None:
        self._taken.clear()
        self._stepped.clear()
        self.clipping = None

    def taken(self) -> list[dict[str, Any]]:
        """The hyperparameters of all groups in the present step."""
        for optimizer in self._optimizers:
            self.take(optimizer)
        return [group for number in sorted(self._taken) for group in self._taken[number]]

    def _groups(self) -> Iterator[dict[str, Any]]:
        return (group for optimizer in self._optimizers for group in optimizer.param_groups)

    def _read(self) -> list[float]:
        return [number for part in self._parts() for number in _numbers_in(part)]

    def _refuse_change(self, num_numbers: int) -> None:
        if num_numbers != len(self.kept):
            raise LoopMisused(
                f"the optimizer's groups and its schedulers have {num_numbers} numbers in place of "
                f"{len(self.kept)}: these may change during a run, but none may be added"
            )

    def _parts(self) -> Iterator[Any]:
        yield from map(_hyperparameters, self._groups())
        yield from (scheduler.state_dict() for scheduler in self._schedulers)
        yield self.scaler.numbers()


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != PARAMETERS
    }


def _advance(scheduler: LRScheduler, num_steps: int) -> None:
    """Step a scheduler; it may end before, since the script may step it less often."""
    arguments = (1.0,) if isinstance(scheduler, ReduceLROnPlateau) else ()
    scheduler.step(*arguments)
    with suppress(Exception):
        for _ in range(num_steps - 1):
            scheduler.step(*arguments)


def _alike(before: Any, after: Any) -> bool:
    """Whether two values differ in numbers only."""
    if len([*_numbers_in(before)]) != len([*_numbers_in(after)]):
        return False
    try:
        return bool(_replaced(before, repeat(0.0)) == _replaced(after, repeat(0.0)))
    except (TypeError, ValueError, RuntimeError):  # values that compare element by element
        return True


def _numbers_in(value: Any) -> Iterator[float]:
    match value:
        case int() | float():
            yield float(value)
        case Tensor() if value.numel() == 1:
            yield float(value)
        case dict():
            for part in value.values():
                yield from _numbers_in(part)
        case list() | tuple():
            for part in value:
                yield from _numbers_in(part)


def _replaced(value: Any, numbers: Iterator[float]) -> Any:
    """The value with other numbers, each of the type that it has, if that can hold it."""
    match value:
        case bool():
            return bool(next(numbers))
        case int():
            number = next(numbers)
            return int(number) if number.is_integer() else number
        case float():
            return next(numbers)
        case Tensor() if value.numel() == 1:
            return value.new_full(value.shape, next(numbers))
        case dict():
            replaced = copy(value)
            for key, part in value.items():
                replaced[key] = _replaced(part, numbers)
            return replaced
        case list():
            return [_replaced(part, numbers) for part in value]
        case tuple():
            return tuple(_replaced(part, numbers) for part in value)
    return value
