"""Checks of the Ray cluster: its nodes, their software and their clocks."""

from __future__ import annotations

from collections.abc import Iterator

from actors.ray_backend.cluster_nodes import NodeReport, query_nodes, software_versions
from pipelines.doctor.finding import Finding
from pipelines.doctor.places import clock
from pipelines.observe.history.formatting import counted


def cluster(address: str | None, namespace: str) -> Iterator[Finding]:
    """Join the cluster if there is one, query each node, and leave."""
    try:
        nodes = query_nodes(address, namespace)
    except (OSError, ValueError) as error:
        fix = "unset RAY_ADDRESS to use a local cluster, or start this one"
        yield Finding("Ray cluster", f"RAY_ADDRESS={address}: {error}", "failed", fix)
        return
    if nodes is None:
        yield Finding("Ray cluster", "none found: a run starts a local one")
        return
    total = {name: sum(node.resources.get(name, 0) for node in nodes) for name in ("CPU", "GPU")}
    yield Finding(
        "Ray cluster",
        f"{counted(len(nodes), 'node')}, {total['CPU']:g} CPUs, {total['GPU']:g} GPUs",
    )
    for node in nodes:
        yield from _node(node)


def _node(node: NodeReport) -> Iterator[Finding]:
    check = f"node {node.address}"
    if node.trouble:
        fix = "install these sources there, or submit them with the job: see docs/cluster.md"
        yield Finding(check, node.trouble, "failed", fix)
        return
    yield node_software(check, node.software, software_versions())
    assert node.clock_s is not None
    yield clock(check, node.clock_s, node.queried_between)


def node_software(check: str, theirs: dict[str, str], ours: dict[str, str]) -> Finding:
    """All workers must run the sources and versions of the driver."""
    differing = {name: version for name, version in theirs.items() if ours.get(name) != version}
    if not differing:
        return Finding(check, "the same sources and versions as here")
    differences = ", ".join(
        f"{name} {version[:12]}, here {ours.get(name, 'none')[:12]}"
        for name, version in differing.items()
    )
    fix = (
        "install the same environment everywhere; send sources with "
        "`ray job submit --working-dir .`"
    )
    is_fatal = bool({"sources", "ray", "python"} & differing.keys())
    return Finding(check, differences, "failed" if is_fatal else "warning", fix)
