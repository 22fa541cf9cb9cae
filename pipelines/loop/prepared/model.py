"""A prepared model: the same object, whose calls reach the trained values."""

from __future__ import annotations

import copyreg
from typing import Any

from torch import nn

from actors.distributed.torch_private import MODULE_TABLES
from pipelines.loop.modules.model_views import CALLED, OWN_CLASS, plain
from pipelines.loop.prepared.called_module import CalledModels, CalledModule
from pipelines.loop.prepared.script_moment import Moment, ScriptMoment
from pipelines.loop.state.errors import LoopMisused


class PreparedModel(nn.Module):
    """Base of the class that a prepared model gets in addition to its own.

    Within a step, calls and attributes are those of this worker's part of the model. Between two
    steps the model has the trained values, gathered from all workers when they are first used.
    """

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        called = _called(self)
        if called.moment is Moment.IN_STEP:
            return called.call(inputs, keywords)
        called.at.refuse_elsewhere()
        _refresh(self)
        with called.calling():
            return super().__call__(*inputs, **keywords)

    def __getattribute__(self, name: str) -> Any:
        """Within a step what the model holds is what this worker's part holds. Between two steps
        the tables of parameters, buffers and parts lead to all that has values."""
        own = object.__getattribute__(self, "__dict__")
        called = own.get(CALLED)
        if called is not None and name in own and name not in (CALLED, "training"):
            if called.moment is Moment.IN_STEP and name in vars(called.part):
                return getattr(called.part, name)
            if name in MODULE_TABLES and called.moment is Moment.BETWEEN_STEPS:
                called.at.refresh()
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        called = self.__dict__.get(CALLED)
        if called is not None and called.moment is Moment.IN_STEP:
            return getattr(called.part, name)
        if any(name in self.__dict__.get(table, ()) for table in MODULE_TABLES):
            _refresh(self)  # torch looks into the tables without asking for them
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if (called := self.__dict__.get(CALLED)) is not None and name != "training":
            called.set(name, value)
        super().__setattr__(name, value)

    def train(self, mode: bool = True) -> PreparedModel:
        """Of the model and, within a step, of this worker's part of it."""
        called, view = _called(self), plain(self)
        called.pull()
        view.train(mode)
        vars(self).update(vars(view))
        called.push()
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing in the loop: the run zeroes the gradients."""
        if not _called(self).at.is_training:
            plain(self).zero_grad(set_to_none)

    def named_parameters(self, *arguments: Any, **keywords: Any) -> Any:
        _refuse_in_step(self, "parameters")
        return super().named_parameters(*arguments, **keywords)

    def named_buffers(self, *arguments: Any, **keywords: Any) -> Any:
        _refuse_in_step(self, "buffers")
        return super().named_buffers(*arguments, **keywords)

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        _refuse_in_step(self, "state_dict")
        return super().state_dict(*arguments, **keywords)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and files have the model's own class."""
        _refuse_in_step(self, "copies")
        reduced = plain(self).__reduce_ex__(protocol)
        if reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        # `pickle` refuses that function for an object of another class.
        return object.__new__, *reduced[1:]


def prepare_model(model: nn.Module, models: CalledModels) -> nn.Module:
    """The same model, as one of these."""
    called = models.declare(model)
    if isinstance(model, PreparedModel):  # one that the script makes once a process
        model.__dict__[CALLED] = called
        return model
    own = type(model)
    names = {key: getattr(own, key) for key in ("__module__", "__qualname__", "__doc__")}
    model.__dict__[CALLED] = called
    model.__class__ = type(own.__name__, (PreparedModel, own), names | {OWN_CLASS: own})
    return model


def _called(model: nn.Module) -> CalledModule:
    called: CalledModule | None = model.__dict__.get(CALLED)
    return called or CalledModule(model, ScriptMoment())  # another model of the same class


def _refresh(model: nn.Module) -> None:
    called = _called(model)
    if called.moment is Moment.BETWEEN_STEPS:
        called.at.refresh()


def _refuse_in_step(model: nn.Module, what: str) -> None:
    if _called(model).moment is Moment.IN_STEP:
        raise LoopMisused(
            f"model.{what}: within a step these are sharded over the workers; use them between "
            "two steps, and clip gradients by clip_grad_norm_(model.parameters(), ...) itself, or "
            "by run.steps(..., max_grad_norm=...)"
        )
    _refresh(model)
