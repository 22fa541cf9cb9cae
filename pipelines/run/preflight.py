"""What a machine or cluster will refuse, found before a Ray cluster is started or joined."""

from __future__ import annotations

from dataclasses import fields

from actors.ray_backend.cluster.connection import own_node_address, will_be_head, will_be_private
from actors.ray_backend.cluster.resources import NoSuchAccelerator, refuse_unknown
from actors.runtime.network import ANYWHERE, Network, listen, own_address
from actors.runtime.pickling import first_unpicklable, why_unpicklable
from actors.storage.errors import UnfitMachine
from pipelines.loop.script import Script
from pipelines.run.plan import RunPlan
from pipelines.settings.errors import UserError
from pipelines.settings.recipe import Recipe


def refuse_unstartable(plan: RunPlan, detach: bool = False) -> None:
    """Raises `UserError` for what would only come to light once Ray's processes are up.

    What the cluster alone knows, such as types of accelerators of its own, is checked there.
    """
    _refuse_unpicklable(plan)
    is_private = will_be_private()
    if is_private and detach:
        raise UserError(
            "--detach needs a cluster that outlives this command: `ray start --head` first, or "
            "set RAY_ADDRESS"
        )
    _refuse_network(plan.run.options.network, will_be_head())
    if is_private:
        try:
            refuse_unknown(plan.settings.accelerator)
        except NoSuchAccelerator as error:
            raise UserError(str(error)) from None


def _refuse_unpicklable(plan: RunPlan) -> None:
    recipe = plan.run.program.kwargs.get("recipe")
    if recipe is None or why_unpicklable(recipe) is None:
        return
    parts = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    name, why = first_unpicklable(parts) or ("recipe", why_unpicklable(recipe))
    kind = "recipe" if isinstance(recipe, Recipe) else "script"
    advice = (
        "make it inside the function"
        if isinstance(recipe, Script)
        else ("make inside the function what cannot be sent, e.g. data=lambda: MyDataset(path)")
    )
    raise UserError(f"the {kind}'s {name} cannot be sent to the workers ({why}): {advice}")


def _refuse_network(network: Network, is_head: bool) -> None:
    """The interface has the same name on every machine; the store listens on the head."""
    if network == ANYWHERE or not (network.interface or is_head):
        return
    try:
        address = own_address(network, own_node_address())
        if is_head:
            listen(address, network).close()
    except UnfitMachine as error:
        raise UserError(str(error)) from None
