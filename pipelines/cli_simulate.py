"""The options of `elastic simulate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from pipelines.cli_options import Changes
from pipelines.simulation.request import SimulateRequest

Trace = Annotated[
    str | None,
    typer.Argument(help="A trace: CSV with time,node,event, or one of known formats."),
]
Generate = Annotated[
    str | None,
    typer.Option(metavar="KEY=VALUE,...", help="A trace such as nodes=64,mtbf_h=24."),
]
WorkersOfTrace = Annotated[
    str | None,
    typer.Option(metavar="MIN:MAX", help="Number of workers. Default: 1 to all nodes."),
]
Layout = Annotated[str | None, typer.Option(help="Target layout, e.g. dp=2,fsdp=2.")]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Stop after this step. Default: with the trace.")
]
StepSeconds = Annotated[
    float | None, typer.Option(help="Seconds of a step with all workers. Default: 1.")
]
Batch = Annotated[
    int | None, typer.Option(min=1, help="Microbatches of a step. Default: 8 for each worker.")
]
StateBytes = Annotated[
    float | None, typer.Option(help="Bytes of parameters and optimizer. Default: 1e9.")
]
FromRun = Annotated[
    str | None, typer.Option(metavar="RUN", help="Measure the costs from the files of this run.")
]
StorageOfRun = Annotated[str, typer.Option(help="Folder or URL that holds that run.")]
WorkersPerNode = Annotated[int, typer.Option(min=1, help="Workers on each node.")]
Notice = Annotated[
    float, typer.Option(min=0, help="How many seconds before its end a node announces it.")
]
CostFile = Annotated[str | None, typer.Option(metavar="FILE", help="A JSON object of costs.")]
CostChanges = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="One cost, e.g. warm_up_s=30. Repeatable."),
]
Compare = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE,...",
        help="Simulate each value of a setting, of workers or of layout (with ;). Repeatable.",
    ),
]
Price = Annotated[float | None, typer.Option(min=0, help="Price of a node-hour.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the results here.")]
Plot = Annotated[str | None, typer.Option(metavar="FILE.png", help="Draw the timeline here.")]


def add_simulate(app: typer.Typer, run: Callable[[SimulateRequest], int]) -> None:
    """Add the command; `run` carries out its request and returns the exit code."""

    @app.command(name="simulate")
    def simulate_command(
        trace: Trace = None,
        generate: Generate = None,
        workers: WorkersOfTrace = None,
        layout: Layout = None,
        steps: Steps = None,
        step_s: StepSeconds = None,
        batch: Batch = None,
        state_bytes: StateBytes = None,
        workers_per_node: WorkersPerNode = 1,
        notice_s: Notice = 0.0,
        from_run: FromRun = None,
        storage: StorageOfRun = "runs",
        costs: CostFile = None,
        cost: CostChanges = None,
        price: Price = None,
        set_: Changes = None,
        compare: Compare = None,
        json_: Json = None,
        plot: Plot = None,
    ) -> None:
        """Run the controller over a TRACE of available nodes, in simulated time."""
        request = SimulateRequest(
            trace=trace,
            generate=generate,
            workers=workers,
            layout=layout,
            steps=steps,
            step_s=step_s,
            batch=batch,
            state_bytes=state_bytes,
            workers_per_node=workers_per_node,
            notice_s=notice_s,
            from_run=from_run,
            storage=storage,
            costs=costs,
            cost=tuple(cost or ()),
            price=price,
            changes=tuple(set_ or ()),
            compare=tuple(compare or ()),
            json=json_,
            plot=plot,
        )
        raise typer.Exit(run(request))
