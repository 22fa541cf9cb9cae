"""Where a script is, within a step or between two: it decides what a prepared object does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from inspect import currentframe
from types import FrameType
from typing import Any, Protocol

from torch import Tensor, nn

from actors.distributed.torch_private import has_gradient_hook
from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.state.model_values import ModelValues
from pipelines.training.custom.modules.custom_module import HOOKED
from pipelines.training.workload.clipping import Clipping

METHODS = {
    "__len__",
    "data_ptr",
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "nelement",
    "numel",
    "requires_grad_",
    "size",
    "stride",
}
"""Methods of a tensor that do not depend on its values."""
VALUES = {"H", "T", "data", "grad", "imag", "mH", "mT", "real"}
"""Attributes that do."""


class Moment(Enum):
    """When a script uses what it has prepared."""

    BEFORE_LOOP = "before the loop"
    IN_STEP = "in a step"
    BETWEEN_STEPS = "between two steps"


class OpenStep(Protocol):
    """The step whose body runs."""

    number: int
    committed: bool

    @property
    def is_reading(self) -> bool: ...

    @property
    def goes_on(self) -> bool: ...

    def close(self) -> None: ...

    def note(self, error: BaseException) -> None: ...

    def note_call(self) -> None: ...


class ScriptMoment:
    """Where a script is, and whether its declared models have the trained values there.

    Between two steps the trained values of all workers are read into the declared models when the
    script first uses one of them.
    """

    def __init__(
        self,
        gather: Callable[[], object] = lambda: None,
        is_script: Callable[[], bool] = lambda: True,
    ) -> None:
        """`gather` lets all workers gather the trained values into the declared models.

        Only where `is_script`, that is on the script's thread, the moment matters: others see the
        declared models as they are.
        """
        self._gather = gather
        self._is_script = is_script
        self.step: OpenStep | None = None
        self.is_first_worker = False
        self.is_training = self.is_stopped = False
        self.is_stale = True
        self.is_stepped = False
        """Whether the script has stepped an optimizer in this step."""
        self.is_again = False
        """Whether the script has begun the present step before."""
        self.behind: OpenStep | None = None
        """The step behind whose block the script is: what it changes in its models there is kept,
        if the step has committed."""
        self.loss: Tensor | None = None
        """The loss of the latest microbatch, as the script has computed it, without its scale."""
        self._seen: list[Tensor] = []
        """The tensors of this worker's pass at which the script has looked."""
        self.norm: Tensor | None = None
        """What the script's clipping of the gradients has returned."""
        self.clip: Callable[[nn.Module, Clipping], Tensor] = _clip_nothing
        self.values = ModelValues()
        self._watched: list[Tensor] = []
        self._were_trained: list[bool] = []

    def watch(self, module: nn.Module) -> None:
        """Watch a declared model, whose parameters have old values within a step. Raises
        `LoopMisused` for one whose gradient has a hook, and for two in the same memory."""
        self._watched += module.parameters()
        self.values.add(module)
        _refuse_shared_memory(module)
        kind = _watched_by(self)
        for name, parameter in module.named_parameters():
            if has_gradient_hook(parameter):
                raise LoopMisused(f"run.prepare: {name} {HOOKED}")
            if type(parameter) is nn.Parameter or isinstance(parameter, WatchedParameter):
                parameter.__class__ = kind

    @property
    def moment(self) -> Moment:
        if self.step is not None:
            return Moment.IN_STEP  # on all threads: autograd has some of its own
        return Moment.BETWEEN_STEPS if self.is_own else Moment.BEFORE_LOOP

    @property
    def is_own(self) -> bool:
        """Whether the script itself runs its loop on the calling thread."""
        return self.is_training and self._is_script()

    @property
    def is_early(self) -> bool:
        """Whether the script runs in front of its loop, on the calling thread."""
        return not self.is_training and self._is_script()

    def enter(self, step: OpenStep) -> None:
        """Enter a step. Raises `LoopMisused` if the script has changed a declared model since
        `keep_changes`."""
        if [p.requires_grad for p in self._watched] != self._were_trained:
            raise LoopMisused(
                f"step {step.number}: the script has changed requires_grad of parameters, which "
                "the run does not see; freeze them before run.prepare (where models are trained in "
                "turn it is not needed: an optimizer that is not stepped changes nothing)"
            )
        self._refuse_changes(f"step {step.number}")
        self.step, self.is_stepped, self.norm = step, False, None
        self.forget_loss()

    def leave(self) -> None:
        self.step, self.behind = None, self.step

    def forget_loss(self) -> None:
        """A pass begins."""
        self.loss = None
        self._seen.clear()

    def take_loss(self, loss: Tensor) -> None:
        """The script computes the gradients of a loss, which may be scaled: then it is known."""
        self.loss = loss if self.loss is None else self.loss
        self._refuse_seen()

    def note_read(self, tensor: Tensor) -> None:
        """The script looks at a number in its own loop over its loader. Raises `LoopMisused` for
        the loss, which is that of a part of the batch until the step has committed."""
        self._seen.append(tensor)
        self._refuse_seen()

    def _refuse_seen(self) -> None:
        if self.step is not None and any(tensor is self.loss for tensor in self._seen):
            raise LoopMisused(
                f"step {self.step.number}: loss.item() in front of optimizer.step(), where it is "
                "the loss of this worker's part of the batch: read it behind optimizer.step(), "
                "where it is that of the whole batch"
            )

    def show(self, loss: float, norm: float) -> None:
        """Let the tensors of the script hold the loss and the gradient's norm of the whole step, so
        that `total += loss.item()` behind it is right with any number of workers."""
        shown, self.loss, self.norm = ((self.loss, loss), (self.norm, norm)), None, None
        for tensor, value in shown:
            if not isinstance(tensor, Tensor) or tensor.numel() != 1 or not math.isfinite(value):
                continue
            if not (tensor.is_leaf and tensor.requires_grad):
                tensor.detach().fill_(value)

    def keep_changes(self) -> dict[str, Tensor]:
        """All that the script has changed in its models since the latest committed step."""
        if not self.is_stale:
            self.values.keep()
        return self.values.kept

    def before_evaluation(self) -> None:
        """Let an evaluation see what the script has changed in its models. Raises `LoopMisused` in
        front of a step."""
        if self.behind is None:
            self._refuse_changes("run.evaluate")
        elif self.behind.committed:
            self.keep_changes()

    def drop_changes(self) -> None:
        """Forget what the script has changed behind a step that has failed."""
        self.is_stale = True
        self.values.note_unread()

    def begin_training(self) -> None:
        """From now on the declared models have old values between two steps."""
        if not self.is_training:
            self.is_training = True
            self.values.note_unread()
            self._were_trained = [p.requires_grad for p in self._watched]
        self.is_stale = True

    def refresh(self) -> None:
        """Read the trained values into the declared models, unless they have them."""
        if self.is_stale:
            self._gather()
            self.is_stale = False
            self.values.note()

    def refuse_elsewhere(self) -> None:
        """Raise `LoopMisused` on a thread that does not see the trained values."""
        if self.is_training and self.step is None and not self._is_script():
            raise LoopMisused(
                "model(...): called by a function that gets the model as its argument, as those "
                "of run.evaluation; use the argument there"
            )

    def refuse_values(self, function: Any, arguments: Sequence[Any]) -> None:
        """Raise `LoopMisused` where a function uses the values, or the gradient, of a declared
        parameter within a step: those that are trained there are others. Between two steps it gets
        the trained ones."""
        if not self._is_script():
            return
        name, attribute = function.__name__, ""
        if name in ("__get__", "__set__"):
            attribute = function.__self__.__name__
        is_getter = name == "__get__" and attribute not in VALUES
        is_dropped = name == "__set__" and attribute == "grad" and arguments[1] is None
        if is_getter or is_dropped or name in METHODS:
            return
        if self.step is None:
            if self.is_training:
                self.refresh()
                self.values.is_suspect |= attribute == "data"
            return
        if attribute == "grad":
            raise LoopMisused(
                f"step {self.step.number}: .grad of a parameter that was taken out of the model "
                "before the loop: within a step the gradients are those of this worker's part of "
                "the model; clip them by clip_grad_norm_(model.parameters(), ...) itself, or by "
                "run.steps(..., max_grad_norm=...); their norm is in the metrics"
            )
        raise LoopMisused(
            f"step {self.step.number}: {attribute or name} of a parameter, or of a part, that was "
            "taken out of the model before the loop: it has old values there; take it out of the "
            "model again, as in model.encoder(x)"
        )

    def refuse_unread(self) -> None:
        """Raise `LoopMisused` within `step.batches()`: workers have different numbers of them."""
        if self.step is not None and self.step.is_reading:
            raise LoopMisused(
                f"step {self.step.number}: scheduler.step() within `step.batches()`; call it "
                "behind that loop, once a step"
            )

    def note_optimizer_step(self) -> None:
        """The script steps an optimizer, in place of which the run does when the step commits."""
        self.is_stepped = self.step is not None and not self.step.is_reading

    def refuse_stepped(self) -> None:
        """Raise `LoopMisused` where a plain loop would use the parameters of the next step."""
        if self.step is not None and self.is_stepped:
            raise LoopMisused(
                f"step {self.step.number}: the model is called after optimizer.step(), which takes "
                "effect when the step commits; call it in the next step, or after the block (for "
                "several updates from the same batch see updates_per_batch of run.steps)"
            )

    def _refuse_changes(self, where: str) -> None:
        changed = [] if self.is_stale else self.values.changed()
        if changed:
            raise LoopMisused(
                f"{where}: the script has changed {changed[0]} of its model in front of `with "
                "step:`; what it changes behind the block, under `if step.committed:`, or before "
                "the loop is kept"
            )
        if self.values.is_counted():
            raise LoopMisused(
                f"{where}: the script has changed a buffer that it took out of the model before "
                "the loop, where it has old values: take it out of the model again"
            )


def _clip_nothing(model: nn.Module, clipping: Clipping) -> Tensor:
    raise LoopMisused("clip_grad_norm_: no loop has begun")


def _refuse_shared_memory(module: nn.Module) -> None:
    known: dict[tuple[int, int], str] = {}
    for name, parameter in module.named_parameters():
        place = parameter.data_ptr(), parameter.untyped_storage().nbytes()
        if not parameter.numel() or parameter.is_meta or not parameter.requires_grad:
            continue
        if (other := known.setdefault(place, name)) != name:
            raise LoopMisused(
                f"run.prepare: {other} and {name} are two parameters in the same memory, so each "
                "would be changed by the update of the other: tie them as one, "
                f"model.{name} = model.{other}, or copy one"
            )


class WatchedParameter(nn.Parameter):
    """A parameter of a declared model, which a script may hold since before its loop."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is the script's own."""
        copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied


def _is_called_by_new_parameter(frame: FrameType | None) -> bool:
    caller = frame.f_back if frame else None
    return caller is not None and caller.f_code is nn.Parameter.__new__.__code__


def _watched_by(at: ScriptMoment) -> type[WatchedParameter]:
    """A class of parameters whose values are refused within a step."""

    class Watched(WatchedParameter):
        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function is Tensor.detach and _is_called_by_new_parameter(currentframe()):
                raise LoopMisused(
                    "nn.Parameter(...) of a parameter of a prepared model: a second one in the "
                    "same memory, which the run would not see: use the model's own, or copy its "
                    "values, as in nn.Parameter(model.weight.detach().clone())"
                )
            at.refuse_values(function, args)
            return nn.Parameter.__torch_function__(function, types, args, kwargs or {})

    return Watched
