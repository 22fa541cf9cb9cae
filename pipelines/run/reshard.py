"""Another layout for a run that goes on: find the run from its folder, ask it, tell what came."""

from __future__ import annotations

from typing import Any

from actors.controller.layout_requests import LayoutReply
from actors.ray_backend.actor_names import NAMESPACE
from actors.ray_backend.driver import ask_for_layout, close_cluster, join_cluster
from actors.storage.errors import ControllerLost, RunNotDriven
from actors.storage.lease import owner_of
from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.commands import Resharded
from pipelines.observe.history.formatting import duration
from pipelines.observe.history.history_file import load_history
from pipelines.observe.history.run_folder import RunFolder, find_run
from pipelines.run.refusals import parse_layout, refuse_unreadable
from pipelines.settings.errors import UserError

PATIENCE_S = 120.0


def reshard(run_name: str, layout: str, storage: str) -> str:
    """Have the run change its layout at the next step boundary; return one line about it.

    Raises `UserError` if there is no such run, it does not run, or refuses the layout.
    """
    refuse_unreadable({"--layout": layout})
    target_layout = parse_layout(layout)
    folder = find_run(run_name, storage)
    owner = _owner(folder)
    address = owner.get("cluster") or ""
    try:
        join_cluster(address, NAMESPACE)
    except OSError as error:
        raise UserError(
            f"run '{folder.name}' is driven on {owner.get('host')}, but its Ray cluster "
            f"{address or 'of no address'} does not answer here ({error}): run this on a machine "
            "of that cluster"
        ) from None
    try:
        return ask(folder, target_layout)
    finally:
        close_cluster(folder.name, keep_actors=True)


def ask(folder: RunFolder, target_layout: TargetLayout) -> str:
    """As `relayout`, in a process that has joined the run's cluster."""
    try:
        reply = ask_for_layout(folder.name, target_layout, PATIENCE_S)
    except RunNotDriven:
        raise _not_running(folder) from None
    except ControllerLost as error:
        raise UserError(
            f"run '{folder.name}': the controller did not answer ({error}); whether it still runs, "
            f"{folder.journal.url} tells"
        ) from None
    return f"run {folder.name}: {_in_words(reply, folder, target_layout)}"


def _owner(folder: RunFolder) -> dict[str, Any]:
    """Who drives the run, from its lease."""
    owner = owner_of(folder.files)
    if owner is None:
        raise _not_running(folder)
    return owner


def _not_running(folder: RunFolder) -> UserError:
    followed = load_history(folder, needs_all_metrics=False)
    followed.follow()
    membership = followed.history.membership
    how = "it was killed"
    if membership.outcome:
        how = f"{membership.outcome} at step {membership.step}"
    return UserError(
        f"run '{folder.name}' is not running ({how}): give --layout to `elastic train` with the "
        "same run name"
    )


def _in_words(reply: LayoutReply, folder: RunFolder, target_layout: TargetLayout) -> str:
    """What has come of it, or the `UserError` that it has come to."""
    told = reply.answered
    if told is not None and told.refusal:
        raise UserError(f"run '{folder.name}' refuses: {told.refusal}")
    if reply.ended:
        raise _not_running(folder)
    if told is None:
        raise UserError(
            f"run '{folder.name}' has not answered for {duration(PATIENCE_S)}: what it does, "
            f"{folder.journal.url} tells"
        )
    if reply.resharded is not None and reply.layout:
        return _change(told.present, reply.layout, reply.resharded)
    if not told.present:
        return f"accepted; nothing trains now, {told.planned} will be the layout when it does"
    if told.present != told.planned:
        change = f"{told.present} -> {told.planned}"
        return f"{change} accepted, but not done after {duration(PATIENCE_S)}"
    if target_layout.data_axes and told.planned != str(
        target_layout.layout(*target_layout.data_axes)
    ):
        return f"accepted; {told.present} stays until there are enough workers for it"
    return f"{told.present} already; nothing to do"


def _change(old: str, new: str, resharded: Resharded) -> str:
    where = f"at step {resharded.step}, generation {resharded.generation}"
    moved = f"{resharded.bytes_moved / 1e6:.1f} MB moved"
    return f"{old} -> {new} {where}; {duration(resharded.seconds)} pause, {moved}"
