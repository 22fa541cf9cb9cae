"""Preflight checks of a plan, made before a Ray cluster is started or joined."""

from __future__ import annotations

import importlib
from dataclasses import fields

from actors.distributed.torch_names import refuse_unknown_torch
from actors.ray_backend.cluster.connection import own_node_address, will_be_head, will_be_private
from actors.ray_backend.cluster.resources import NoSuchAccelerator, refuse_unknown
from actors.runtime.network import ANYWHERE, Network, listen, listen_address
from actors.runtime.pickling import (
    first_unpicklable,
    unpicklable_variable,
    why_unpicklable,
)
from actors.storage.errors import UnsuitableMachine
from pipelines.errors import UserError
from pipelines.loop.script import Script
from pipelines.run.plan import RunPlan
from pipelines.settings.recipe import Recipe
from pipelines.settings.user_code import described, user_code_errors


def refuse_unstartable(plan: RunPlan, detach: bool = False) -> None:
    """Raises `UserError` for problems that would otherwise appear only after Ray has started.

    Checks that need the cluster, such as its types of accelerators, follow after joining it.
    """
    _refuse_torch()
    _refuse_unknown_check(plan.settings.health.check)
    _refuse_unpicklable(plan)
    if detach and plan.callbacks:
        raise UserError("--callback is called by this command, which --detach ends: drop one")
    is_private = will_be_private()
    if is_private and detach:
        raise UserError(
            "--detach needs a cluster that outlives this command: run `ray start --head` first, or "
            "set RAY_ADDRESS"
        )
    _refuse_network(plan.run.options.network, will_be_head())
    if is_private:
        try:
            refuse_unknown(plan.settings.accelerator)
        except NoSuchAccelerator as error:
            raise UserError(str(error)) from None


def _refuse_torch() -> None:
    try:
        refuse_unknown_torch()
    except UnsuitableMachine as error:
        raise UserError(str(error)) from None


def _refuse_unknown_check(name: str | None) -> None:
    if name is None:
        return
    module, _, function = name.partition(":")
    with user_code_errors(f"health.check={name}"):
        try:
            found = getattr(importlib.import_module(module), function, None)
        except ModuleNotFoundError as error:
            raise UserError(f"health.check={name}: {error}") from None
    if not callable(found):
        raise UserError(f"health.check={name}: {module} has no function '{function}'")


def _refuse_unpicklable(plan: RunPlan) -> None:
    recipe = plan.run.program.kwargs.get("recipe")
    if recipe is None or why_unpicklable(recipe) is None:
        return
    parts = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    name, why = first_unpicklable(parts) or ("recipe", why_unpicklable(recipe))
    kind = "recipe" if isinstance(recipe, Recipe) else "script"
    if (variable := unpicklable_variable(parts.get(name))) is not None:
        what, value = variable
        raise UserError(
            f"{described(parts[name])}: the {kind}'s {name} uses {what}, of type "
            f"{type(value).__name__}, which cannot be pickled for the workers ({why}): create it "
            "inside the function, or put the function into a file and give file.py:function"
        )
    advice = (
        "create it inside the function"
        if isinstance(recipe, Script)
        else ("create it inside a function, e.g. data=lambda: MyDataset(path)")
    )
    raise UserError(f"the {kind}'s {name} cannot be pickled for the workers ({why}): {advice}")


def _refuse_network(network: Network, is_head: bool) -> None:
    """Check the named interface, which every machine must have, and the ports if this machine is
    the head, where the store listens."""
    if network == ANYWHERE or not (network.interface or is_head):
        return
    try:
        address = listen_address(network, own_node_address())
        if is_head:
            listen(address, network).close()
    except UnsuitableMachine as error:
        raise UserError(str(error)) from None
