"""`elastic reshard`: requests another layout from a run in progress and reports the outcome."""

from __future__ import annotations

from typing import Any

from actors.controller.layout_requests import LayoutReply
from actors.ray_backend.actor_names import NAMESPACE
from actors.ray_backend.driver import close_cluster, join_cluster, send_layout_request
from actors.storage.errors import ControllerLost, RunNotDriven
from actors.storage.lease import owner_of
from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.notes import Resharded
from pipelines.errors import UserError
from pipelines.observe.history.formatting import duration
from pipelines.observe.history.history_file import load_history
from pipelines.observe.history.run_folder import RunFolder, find_run
from pipelines.run.refusals import parse_layout, refuse_unreadable

PATIENCE_S = 120.0


def reshard(run_name: str, layout: str, storage: str) -> str:
    """Request a layout, which the run takes at its next step boundary; return a line about it.

    Raises `UserError` if there is no such run, it is not running, or it refuses the layout.
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
            f"{address or 'without an address'} does not answer here ({error}): run this command "
            "on a machine of that cluster"
        ) from None
    try:
        return request_layout(folder, target_layout)
    finally:
        close_cluster(folder.name, keep_actors=True)


def request_layout(folder: RunFolder, target_layout: TargetLayout) -> str:
    """As `reshard`, in a process that has joined the run's cluster."""
    try:
        reply = send_layout_request(folder.name, target_layout, PATIENCE_S)
    except RunNotDriven:
        raise _not_running(folder) from None
    except ControllerLost as error:
        raise UserError(
            f"run '{folder.name}': the controller did not answer ({error}); "
            f"{folder.journal.url} shows whether it still runs"
        ) from None
    return f"run {folder.name}: {_in_words(reply, folder, target_layout)}"


def _owner(folder: RunFolder) -> dict[str, Any]:
    """The driver of the run, from its lease. Raises `UserError` if there is none."""
    owner = owner_of(folder.files)
    if owner is None:
        raise _not_running(folder)
    return owner


def _not_running(folder: RunFolder) -> UserError:
    followed = load_history(folder, needs_all_metrics=False)
    followed.follow()
    membership = followed.history.membership
    ending = "it was killed"
    if membership.outcome:
        ending = f"{membership.outcome} at step {membership.step}"
    return UserError(
        f"run '{folder.name}' is not running ({ending}): resume it with `elastic train`, the same "
        "--run-name and this --layout"
    )


def _in_words(reply: LayoutReply, folder: RunFolder, target_layout: TargetLayout) -> str:
    """The outcome of the request. Raises `UserError` if it was refused or not answered."""
    answer = reply.answered
    if answer is not None and answer.refusal:
        raise UserError(f"run '{folder.name}' refuses the layout: {answer.refusal}")
    if reply.ended:
        raise _not_running(folder)
    if answer is None:
        raise UserError(
            f"run '{folder.name}' has not answered for {duration(PATIENCE_S)}: see "
            f"{folder.journal.url}"
        )
    if reply.resharded is not None and reply.layout:
        return _change(answer.present, reply.layout, reply.resharded)
    if not answer.present:
        return f"accepted; the run is waiting and will resume with {answer.planned}"
    if answer.present != answer.planned:
        change = f"{answer.present} -> {answer.planned}"
        return f"{change} accepted, but not finished after {duration(PATIENCE_S)}"
    if target_layout.data_axes and answer.planned != str(
        target_layout.layout(*target_layout.data_axes)
    ):
        return f"accepted; {answer.present} stays until there are enough workers for it"
    return f"the layout is already {answer.present}; nothing to do"


def _change(old: str, new: str, resharded: Resharded) -> str:
    where = f"at step {resharded.step}, generation {resharded.generation}"
    moved = f"{resharded.bytes_moved / 1e6:.1f} MB moved"
    return f"{old} -> {new} {where}; {duration(resharded.seconds)} pause, {moved}"
