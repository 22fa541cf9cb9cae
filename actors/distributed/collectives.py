"""How far this process has come in the collectives of its groups, by torch's flight recorder."""

from __future__ import annotations

import json
from typing import Any

from actors.distributed.backends.torch_groups_private import flight_recorder
from elastic.protocol.events import GroupProgress

WORLD = "default_pg"
"""torch's description of the default group."""
MESH = "mesh_"
"""The beginning of torch's description of a group of a mesh; its axis follows."""


def group_progress(device_type: str, since_ns: int) -> tuple[GroupProgress, ...]:
    """The progress in each group that exists since then (nanoseconds since the epoch), as far as
    torch has recorded it."""
    return progress_in(flight_recorder(device_type), since_ns)


def progress_in(recorded: dict[str, Any], since_ns: int) -> tuple[GroupProgress, ...]:
    """The progress in each group in a dump of the flight recorder, which also has entries of
    earlier generations."""
    last = {
        entry["pg_id"]: entry
        for entry in recorded.get("entries", ())
        if entry["time_created_ns"] >= since_ns and not entry["is_p2p"]
    }
    progress = []
    for number, entry in sorted(last.items()):
        name, description = entry["process_group"]
        begun = entry["collective_seq_id"]
        status = recorded.get("pg_status", {}).get(str(number), {})
        ended = begun if entry["retired"] else int(status.get("last_completed_collective", 0))
        config = recorded.get("pg_config", {}).get(name, {})
        progress.append(
            GroupProgress(
                axis="world" if description == WORLD else description.removeprefix(MESH),
                ranks=tuple(json.loads(config.get("ranks") or "[]")),
                begun=begun,
                ended=min(begun, ended),
                operation=entry["profiling_name"].partition(":")[2],
            )
        )
    return tuple(progress)


def progress_text(groups: tuple[GroupProgress, ...]) -> str:
    """A line for each group."""
    return "".join(
        f"{group.axis} {list(group.ranks)}: {group.ended} collectives ended, "
        f"{group.begun} begun, the last is {group.operation}\n"
        for group in groups
    )
