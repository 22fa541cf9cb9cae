"""A run in plain processes, without Ray and MLflow, whose workers simulate several nodes.

plain_run.py STORAGE RECIPE LAYOUT NUM_NODES PROGRAM [key=value ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from elastic_run import RUN_NAME, ElasticRun
from processes import python, running

from actors.controller.shell import Shell
from actors.local.process_fleet import ProcessFleet
from actors.storage.lease import claim
from actors.storage.storage import open_storage
from elastic.geometry.layout import Layout
from pipelines.observe.history.run_folder import RunFolder
from pipelines.run.plan import TrainRequest, make_plan

NUM_STEPS = 1_000_000


@contextmanager
def plain_run(
    storage: Path,
    recipe: str,
    layout: str,
    num_nodes: int,
    changes: Sequence[str],
    program: str = "",
    environment: Mapping[str, str] | None = None,
) -> Iterator[ElasticRun]:
    """Start such a run in a separate program, until the block ends.

    `program` names a training program in this folder; empty: the usual one.
    """
    storage.mkdir(parents=True, exist_ok=True)
    arguments = [str(storage), recipe, layout, str(num_nodes), program, *changes]
    command = python(Path(__file__), *arguments)
    with running("plain", command, storage, environment or {}) as running_program:
        yield ElasticRun(running_program, RunFolder.of(storage, RUN_NAME))


def main(arguments: Sequence[str]) -> None:
    storage, recipe, layout, num_nodes, program, *changes = arguments
    request = TrainRequest(
        recipe,
        RUN_NAME,
        storage,
        workers=str(Layout.parse(layout).num_workers),
        layout=layout,
        steps=NUM_STEPS,
        data="random",
        changes=tuple(changes),
    )
    run = make_plan(request, num_gpus=0).run
    lease = claim(open_storage(run.folder))
    shell = Shell(open_storage(run.folder), lease)

    def node_of(worker: str) -> str:
        """Workers, replacements included, are assigned to nodes round-robin."""
        return f"node-{int(worker.removeprefix('w')) % int(num_nodes)}"

    factory = replace(run.program, target=program or run.program.target)
    fleet = ProcessFleet(factory, run.options, shell.post, lease.epoch, node_of)
    shell.run(fleet, run.opening)


if __name__ == "__main__":
    main(sys.argv[1:])
