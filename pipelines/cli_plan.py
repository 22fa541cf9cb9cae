"""The options of `elastic plan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import typer

from pipelines.cli_options import Changes, Prices

PlannedRecipe = Annotated[
    str | None, typer.Argument(help="A recipe, as for `elastic train`.", show_default=False)
]
PlannedWorkers = Annotated[
    str, typer.Option(metavar="N,N", help="Numbers of workers, separated by commas.")
]
PlannedLayouts = Annotated[
    str | None,
    typer.Option(metavar="LAYOUTS", help="Only these layouts: 'fsdp=8; dp=2,fsdp=4'."),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The workers' device, e.g. H100-80GB, L4 or cpu; several with commas. Default: that "
        "of this machine.",
    ),
]
Efficiency = Annotated[
    float, typer.Option(metavar="SHARE", help="Share of the peak that computation reaches.")
]
DeviceMemory = Annotated[float | None, typer.Option(metavar="GB", help="Memory of a device.")]
DeviceFlops = Annotated[
    float | None,
    typer.Option(metavar="TFLOPS", help="Peak of a device, 10^12 operations a second."),
]
DeviceBandwidth = Annotated[
    float | None, typer.Option(metavar="GB/S", help="Bandwidth of a device's memory.")
]
LinkBandwidth = Annotated[
    float | None, typer.Option(metavar="GB/S", help="Bandwidth between two devices of a node.")
]
FarBandwidth = Annotated[
    float | None, typer.Option(metavar="GB/S", help="Bandwidth between devices of two nodes.")
]
MeasuredFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Predict from what this machine was measured to take for RECIPE. FILE is written in "
        "up to a minute if it does not exist.",
    ),
]
PlanAsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object; docs/plan.md lists the keys.")
]
ModelParams = Annotated[
    float | None,
    typer.Option(metavar="NUMBER", help="Without RECIPE: the model's parameters, e.g. 7e9."),
]
WorldSizes = Annotated[
    str, typer.Option(help="With --model-params: numbers of workers that shard the state.")
]


class PlanWords(NamedTuple):
    """What the command line says, unread."""

    recipe: str | None
    workers: str
    device: str | None
    prices: tuple[str, ...]
    layouts: str | None
    changes: tuple[str, ...]
    as_json: bool
    efficiency: float
    device_figures: tuple[float | None, ...]
    """Memory, FLOPs, the bandwidths of the memory, within a node and between nodes."""
    model_params: float | None
    world_sizes: str
    measured: str | None = None


def add_plan(app: typer.Typer, run: Callable[[PlanWords], int]) -> None:
    """Add the command; `run` carries it out and returns the exit code."""

    @app.command()
    def plan(
        recipe: PlannedRecipe = None,
        workers: PlannedWorkers = "8",
        device: DeviceName = None,
        price: Prices = None,
        layout: PlannedLayouts = None,
        set_: Changes = None,
        json_: PlanAsJson = False,
        efficiency: Efficiency = 0.45,
        device_memory: DeviceMemory = None,
        device_flops: DeviceFlops = None,
        device_bandwidth: DeviceBandwidth = None,
        link_bandwidth: LinkBandwidth = None,
        far_bandwidth: FarBandwidth = None,
        model_params: ModelParams = None,
        world_sizes: WorldSizes = "1,8,64,512",
        measured: MeasuredFile = None,
    ) -> None:
        """Rank the layouts of RECIPE on a device: memory, speed, hours and price."""
        figures = (device_memory, device_flops, device_bandwidth, link_bandwidth, far_bandwidth)
        words = PlanWords(
            recipe=recipe,
            workers=workers,
            device=device,
            prices=tuple(price or ()),
            layouts=layout,
            changes=tuple(set_ or ()),
            as_json=json_,
            efficiency=efficiency,
            device_figures=figures,
            model_params=model_params,
            world_sizes=world_sizes,
            measured=measured,
        )
        raise typer.Exit(run(words))
