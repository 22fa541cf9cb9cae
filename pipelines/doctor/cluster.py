"""The Ray cluster at hand: its nodes, what they run, and their clocks."""

from __future__ import annotations

from collections.abc import Iterator

from actors.ray_backend.cluster_nodes import NodeSeen, own_software, see_nodes
from pipelines.doctor.finding import Finding
from pipelines.doctor.places import clock
from pipelines.observe.history.formatting import counted


def cluster(address: str | None, namespace: str) -> Iterator[Finding]:
    """Join it, ask each node, and leave; without one there is nothing to find fault with."""
    try:
        nodes = see_nodes(address, namespace)
    except (OSError, ValueError) as error:
        mend = "start it, or unset RAY_ADDRESS to have a local one"
        yield Finding("Ray cluster", f"RAY_ADDRESS={address}: {error}", "failed", mend)
        return
    if nodes is None:
        yield Finding("Ray cluster", "none at hand: a run starts a local one")
        return
    total = {name: sum(node.resources.get(name, 0) for node in nodes) for name in ("CPU", "GPU")}
    yield Finding(
        "Ray cluster",
        f"{counted(len(nodes), 'node')}, {total['CPU']:g} CPUs, {total['GPU']:g} GPUs",
    )
    for node in nodes:
        yield from _node(node)


def _node(node: NodeSeen) -> Iterator[Finding]:
    what = f"node {node.address}"
    if node.trouble:
        mend = "install this working tree there, or submit it: docs/cluster.md"
        yield Finding(what, node.trouble, "failed", mend)
        return
    yield node_software(what, node.software, own_software())
    assert node.told is not None
    yield clock(what, node.told, node.between)


def node_software(what: str, theirs: dict[str, str], ours: dict[str, str]) -> Finding:
    """All workers must run the sources and versions of the driver."""
    differing = {name: version for name, version in theirs.items() if ours.get(name) != version}
    if not differing:
        return Finding(what, "the same sources and versions as here")
    told = ", ".join(
        f"{name} {version[:12]}, here {ours.get(name, 'none')[:12]}"
        for name, version in differing.items()
    )
    mend = "install one environment everywhere; sources by `ray job submit --working-dir .`"
    is_fatal = bool({"sources", "ray", "python"} & differing.keys())
    return Finding(what, told, "failed" if is_fatal else "warning", mend)
