"""What the calls of a prepared model reach: this worker's part of it, or the whole module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

from torch import Tensor, nn

from actors.distributed.torch_private import num_changes
from pipelines.loop.prepared.errors import LoopMisused


class Moment(Enum):
    """When a script uses its model."""

    BEFORE_LOOP = "before the loop"
    IN_STEP = "in a step"
    BETWEEN_STEPS = "between two steps"


class OpenStep(Protocol):
    """The step whose body runs."""

    number: int

    @property
    def is_reading(self) -> bool: ...

    def note(self, error: BaseException) -> None: ...


class CalledModule:
    """The target of a prepared model's calls.

    Within a step it is this worker's part in the current generation. Between two steps it is the
    declared module, into which the trained values of all workers are read when they are first used.
    """

    def __init__(
        self,
        gather: Callable[[], object] = lambda: None,
        is_script: Callable[[], bool] = lambda: True,
    ) -> None:
        """`gather` lets all workers gather the trained values into `tensors`.

        Only where `is_script`, that is on the script's thread, the moment matters: others see the
        declared module as it is.
        """
        self._gather = gather
        self._is_script = is_script
        self.part: nn.Module | None = None
        """This worker's part, which the run replaces at each reshard."""
        self.declared: nn.Module | None = None
        self._declared_parameters: list[nn.Parameter] = []
        self._were_trained: list[bool] = []
        self._attributes: dict[str, Any] = {}
        """What the script has set since the loop began, for this worker's part, too."""
        self.is_first_worker = False
        self.is_training = self.is_stopped = False
        self._is_calling = False
        self.is_stale = True
        self._step: OpenStep | None = None
        self._num_changes = 0

    def declare(self, module: nn.Module) -> None:
        """Take the module that the script prepares, with its values of step 0."""
        self.declared = module
        self._declared_parameters = list(module.parameters())

    @property
    def moment(self) -> Moment:
        if self._step is not None:
            return Moment.IN_STEP  # on all threads: autograd has some of its own
        is_between = self.is_training and self._is_script()
        return Moment.BETWEEN_STEPS if is_between else Moment.BEFORE_LOOP

    def enter(self, step: OpenStep) -> None:
        """Enter a step. Raises `LoopMisused` if the script has changed the declared module."""
        if [p.requires_grad for p in self._declared_parameters] != self._were_trained:
            raise LoopMisused(
                f"step {step.number}: the script has changed requires_grad of parameters, which "
                "the run does not see; freeze them before run.prepare"
            )
        if self._count_changes() != self._num_changes:
            raise LoopMisused(
                f"step {step.number}: the script has changed the model's parameters since the "
                "step before, which the run does not see; change them before the loop"
            )
        self._step = step

    def leave(self) -> None:
        self._step = None

    def use(self, part: nn.Module) -> None:
        """Take this worker's part for the next step."""
        self.part = part
        for name, value in self._attributes.items():
            setattr(part, name, value)

    def set(self, name: str, value: Any) -> None:
        """Note an attribute that the script sets on its model."""
        if not self.is_training or self._is_calling or not self._is_script():
            return
        if isinstance(value, nn.Module | Tensor):
            raise LoopMisused(
                f"model.{name}: parts and tensors of the model cannot be set in the loop"
            )
        self._attributes[name] = value
        if self._step is not None and self.part is not None:
            setattr(self.part, name, value)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """While the declared module itself is called: what it sets on itself is its own."""
        self._is_calling = True
        try:
            yield
        finally:
            self._is_calling = False

    def refuse_elsewhere(self) -> None:
        """Raise `LoopMisused` on a thread that does not see the trained values."""
        if self.is_training and self._step is None and not self._is_script():
            raise LoopMisused(
                "model(...): called by a function that gets the model as its argument, as those "
                "of run.evaluation; use the argument there"
            )

    def refuse_unread(self) -> None:
        """Raise `LoopMisused` within `step.batches()`: workers have different numbers of them."""
        if self._step is not None and self._step.is_reading:
            raise LoopMisused(
                f"step {self._step.number}: scheduler.step() within `step.batches()`; call it "
                "behind that loop, once a step"
            )

    def begin_training(self) -> None:
        """From now on the declared module has old values between two steps."""
        if not self.is_training:
            self.is_training, self._num_changes = True, self._count_changes()
            self._were_trained = [p.requires_grad for p in self._declared_parameters]
        self.is_stale = True

    def call(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call this worker's part."""
        assert self.part is not None, "a step without a module"
        try:
            return self.part(*inputs, **keywords)
        except BaseException as error:
            if self._step is not None:
                self._step.note(error)
            raise

    def tensors(self) -> dict[str, Tensor]:
        """The declared module's parameters and buffers, by name."""
        assert self.declared is not None, "a model that was not prepared"
        return dict(nn.Module.state_dict(self.declared))

    def refresh(self) -> None:
        """Read the trained values into the declared module, unless it has them."""
        if self.is_stale:
            self._gather()
            self.is_stale = False
            self._num_changes = self._count_changes()

    def _count_changes(self) -> int:
        return sum(map(num_changes, self._declared_parameters))
