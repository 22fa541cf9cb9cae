"""What the calls of prepared models reach: this worker's parts of them, or the whole modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from actors.distributed.torch_private import direct_buffers, without_tensor_subclasses
from pipelines.loop.modules.model_views import plain
from pipelines.loop.modules.shared_attributes import SharedAttributes
from pipelines.loop.prepared.script_moment import Moment, ScriptMoment
from pipelines.loop.state.errors import LoopMisused
from pipelines.training.models.joined_model import roots_of
from pipelines.training.workload.trees import mapped


class CalledModule:
    """The target of one prepared model's calls.

    Within a step it is this worker's part in the current generation. Between two steps it is the
    declared module, into which the trained values of all workers are read when they are first used.
    """

    def __init__(self, declared: nn.Module, at: ScriptMoment) -> None:
        """`declared` is the module that the script prepares, with its values of step 0."""
        self.declared = declared
        self.at = at
        self.part: nn.Module | None = None
        """This worker's part, which the run replaces at each reshard."""
        self._shared: SharedAttributes | None = None
        self._is_calling = False

    @property
    def moment(self) -> Moment:
        return self.at.moment

    def use(self, part: nn.Module) -> None:
        """Take this worker's part for the next step, or for an evaluation."""
        self.part, self._shared = part, SharedAttributes.of(self.declared, part)
        self._shared.begin()
        self._note_texts()

    def forget_part(self) -> None:
        self.part = self._shared = None

    def push(self) -> None:
        """Give the part what the script has changed in its model during the step."""
        if self._shared is not None:
            self._shared.push()

    def pull(self) -> None:
        """Give the script's model the modes, numbers and texts that its part has."""
        if self._shared is not None:
            self._shared.pull()

    def _note_texts(self) -> None:
        """Print once which texts a worker that joins would not have."""
        assert self._shared is not None
        if (names := self._shared.changed_texts) and self.at.is_first_worker:
            print(
                f"elastic: {', '.join(f'model.{name}' for name in names)}: the script changes this "
                "text in its loop, but it is not part of the run's state: set it in front of "
                "`with step:`, by what is the same on all workers",
                flush=True,
            )
        names.clear()

    def set(self, name: str, value: Any) -> None:
        """The script sets an attribute of its model."""
        if self._is_calling or not self.at.is_own:
            return
        is_buffer = self.at.step is None and name in direct_buffers(self.declared)
        if isinstance(value, Tensor) and is_buffer:
            return
        if isinstance(value, nn.Module | Tensor):
            raise LoopMisused(
                f"model.{name}: parts and tensors of the model cannot be set in the loop"
            )
        if self.at.step is not None and self.part is not None:
            setattr(self.part, name, value)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """While the declared module itself is called: what it sets on itself is its own."""
        self._is_calling = True
        try:
            yield
        finally:
            self._is_calling = False

    def call(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call this worker's part."""
        assert self.part is not None, "a step without a module"
        try:
            self.at.refuse_stepped()
            self.push()
            output = self.part(*inputs, **keywords)
            if self.at.step is not None:
                self.at.step.note_call()
            return output
        except BaseException as error:
            step = self.at.step
            if step is not None:
                step.note(error)
            if step is None or not step.goes_on or not isinstance(error, Exception):
                raise
            return self._call_stale(inputs, keywords, error)

    def _call_stale(self, inputs: Any, keywords: Any, error: Exception) -> Any:
        """What the declared module returns with its old values, for a body that has failed: the
        script's own loop runs on to the next step, which is the same again. Raises the error if
        the inputs do not fit that module either."""
        own = next(self.declared.parameters())
        device = own.device

        def moved(tensor: Tensor) -> Tensor:
            nonlocal device
            device = tensor.device
            return tensor.to(own.device, own.dtype if tensor.is_floating_point() else None)

        try:
            with without_tensor_subclasses(), self.calling():
                output = plain(self.declared)(*mapped(moved, inputs), **mapped(moved, keywords))
            return mapped(lambda tensor: tensor.to(device), output)
        except Exception:
            raise error from None


class CalledModels:
    """The targets of all models that a script prepares; the run trains them as one module."""

    def __init__(self, at: ScriptMoment | None = None) -> None:
        self.at = at or ScriptMoment()
        self._models: list[CalledModule] = []

    def __len__(self) -> int:
        return len(self._models)

    def declare(self, model: nn.Module) -> CalledModule:
        """Add a model. Raises `LoopMisused` for one that is, or has, or is part of another."""
        for known in self.declared:
            for whole, part in ((known, model), (model, known)):
                if any(part is inner for inner in whole.modules()):
                    raise LoopMisused(
                        f"run.prepare: {type(part).__name__} is prepared twice, or with the model "
                        "of which it is a part; pass each model once, and no parts"
                    )
        called = CalledModule(model, self.at)
        self._models.append(called)
        self.at.watch(model)
        return called

    @property
    def declared(self) -> list[nn.Module]:
        """The declared modules; from the script's first step on their values are others."""
        return [model.declared for model in self._models]

    def use(self, whole: nn.Module) -> None:
        """Take this worker's part of each model for the next step."""
        for model, part in zip(self._models, roots_of(whole), strict=True):
            model.use(part)

    def pull(self) -> None:
        """Give the script's models the modes, numbers and texts that their parts have."""
        for model in self._models:
            model.pull()

    def forget_parts(self) -> None:
        for model in self._models:
            model.forget_part()
