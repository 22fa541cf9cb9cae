"""The command line: `elastic` train, status, logs, sweep, relayout, export, prepare, plan, doctor.

The only file that imports inside functions: `elastic status` waits for no torch, Ray or MLflow.
"""

from __future__ import annotations

import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from pipelines.run.refusals import refuse_undecodable
from pipelines.settings.errors import UserCodeFailed, UserError

if TYPE_CHECKING:
    from pipelines.run.plan import TrainRequest

app = typer.Typer(
    help="Training that never stops because a machine did.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

USER_ERROR = 2
STORAGE_HELP = "The folder that holds runs, or its URL, e.g. s3://bucket/runs."
TABLE_WIDTH = 110
"""Of what is written to a file; a terminal has its own."""


Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override any field of the recipe."),
]


FaultOptions = Annotated[
    list[str] | None,
    typer.Option(metavar="SENTENCE", help="A fault, e.g. 'kill worker 3 at step 60'."),
]
RecipeName = Annotated[
    str,
    typer.Argument(
        help="tiny | tiny_moe | byte_lm | mlp | finetune | hf:FOLDER | file.py:function | "
        "module:function"
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="A folder, file or glob of text (.txt, .jsonl, .parquet, .arrow); token shards, also "
        "at a URL (s3://bucket/folder); or 'random'."
    ),
]
Interface = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The network interface to talk over; default: that on the route to the head.",
    ),
]
Ports = Annotated[
    str | None,
    typer.Option(metavar="FIRST:LAST", help="Listen on these ports only, e.g. 20000:20100."),
]
NotifyUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar="ELASTIC_NOTIFY",
        show_envvar=True,
        help="Post a JSON object there when the run has waited for long, and when it has stopped.",
    ),
]
TrackingUri = Annotated[
    str | None, typer.Option(help="MLflow server or store; default: inside the storage.")
]
AuditEvery = Annotated[
    int | None,
    typer.Option(metavar="N", help="Compare the replicas bit by bit after every N steps."),
]
Detach = Annotated[bool, typer.Option("--detach", help="Leave the run to its cluster and return.")]
Profile = Annotated[
    str | None,
    typer.Option(
        metavar="steps=FIRST:LAST",
        help="Keep each worker's torch.profiler trace of these steps, e.g. steps=10:13.",
    ),
]
InProcess = Annotated[
    bool,
    typer.Option("--in-process", help="One worker, in this process, without Ray: for debuggers."),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Say what would be done, had and needed; start nothing."),
]


@app.callback()
def elastic() -> None:
    """Training that never stops because a machine did."""


@app.command()
def train(
    recipe: RecipeName,
    run_name: Annotated[
        str | None, typer.Option(help="The run's name; the same name again resumes it.")
    ] = None,
    storage: Annotated[str, typer.Option(help=STORAGE_HELP)] = "runs",
    workers: Annotated[
        str | None, typer.Option(metavar="MIN:MAX", help="How many workers; MAX alone is 1:MAX.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="The layout wished for at full strength, e.g. dp=2,fsdp=2.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Stop after this step.")] = None,
    data: Data = None,
    set_: Changes = None,
    audit_every: AuditEvery = None,
    inject: FaultOptions = None,
    record_samples: Annotated[
        bool, typer.Option("--record-samples", help="Write down the samples each rank reads.")
    ] = False,
    tracking_uri: TrackingUri = None,
    experiment: Annotated[str, typer.Option(help="MLflow experiment.")] = "elastic",
    interface: Interface = None,
    ports: Ports = None,
    notify: NotifyUrl = None,
    detach: Detach = False,
    profile: Profile = None,
    in_process: InProcess = False,
    dry_run_: DryRun = False,
) -> None:
    """Train RECIPE, or resume the run of that name."""
    from pipelines.run.refusals import refuse_early

    refuse_early(recipe, workers, layout)
    from pipelines.run.plan import TrainRequest

    request = TrainRequest(
        recipe=recipe,
        run_name=run_name,
        storage=storage,
        workers=workers,
        layout=layout,
        steps=steps,
        data=data,
        changes=tuple(set_ or ()),
        audit_every=audit_every,
        inject=tuple(inject or ()),
        record_samples=record_samples,
        tracking_uri=tracking_uri,
        experiment=experiment,
        interface=interface,
        ports=ports,
        notify=notify,
        detach=detach,
        profile=profile,
    )
    raise typer.Exit(_train(request, dry_run_, in_process))


def _train(request: TrainRequest, is_dry_run: bool, is_in_process: bool) -> int:
    if is_dry_run:
        from pipelines.run.dry_run import dry_run

        return dry_run(request, Console(width=None if sys.stdout.isatty() else TABLE_WIDTH))
    if is_in_process:
        from pipelines.run.in_process import train_in_process

        return train_in_process(request, Console())
    from pipelines.run.drive import drive

    return drive(request, Console())


@app.command(name="status")
def status_command(
    run: Annotated[str, typer.Argument(help="The name of a run.")],
    storage: Annotated[str, typer.Option(help=STORAGE_HELP)] = "runs",
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on showing it for as long as somebody drives it.")
    ] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="One JSON object a line; docs/files.md lists its keys.")
    ] = False,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[TYPE=]NUMBER",
            help="What a worker costs an hour, on nodes of a type; may be repeated.",
        ),
    ] = None,
) -> None:
    """Say how RUN stands: who is where, and where its time has gone."""
    from pipelines.observe.view.status import status

    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    raise typer.Exit(status(run, storage, price or (), watch, json_, console))


@app.command(name="logs")
def logs_command(
    run: Annotated[str, typer.Argument(help="The name of a run.")],
    worker: Annotated[str, typer.Option(help="Whose, as `elastic status` names it, e.g. w3.")],
    storage: Annotated[str, typer.Option(help=STORAGE_HELP)] = "runs",
) -> None:
    """Print what a worker of RUN printed and raised."""
    from pipelines.observe.view.logs import logs

    for line in logs(run, worker, storage):
        typer.echo(line)


@app.command(name="sweep")
def sweep_command(
    recipe: Annotated[str, typer.Argument(help="As of `train`.")],
    layouts: Annotated[
        str, typer.Option(metavar="LAYOUTS", help="With semicolons between: 'tp=1; dp=2,tp=2'.")
    ],
    steps: Annotated[int, typer.Option(help="Steps a layout; the first is not counted.")] = 10,
    start_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Give a layout up that has not begun by then.")
    ] = 600.0,
    storage: Annotated[str, typer.Option(help=STORAGE_HELP)] = "runs",
    data: Annotated[
        str | None, typer.Option(help="A folder, file or glob of text, or 'random'.")
    ] = None,
    set_: Changes = None,
) -> None:
    """Train RECIPE for a few steps under each layout; print speed, bytes and peak memory."""
    from pipelines.run.refusals import refuse_early

    refuse_early(recipe)
    from pipelines.run.sweep import SweepRequest, sweep

    request = SweepRequest(recipe, layouts, storage, steps, data, tuple(set_ or ()), start_timeout)
    width = None if sys.stdout.isatty() else TABLE_WIDTH
    raise typer.Exit(sweep(request, Console(width=width)))


@app.command(name="reshard")
def reshard_command(
    run: Annotated[str, typer.Argument(help="The name of a run that goes on.")],
    layout: Annotated[
        str, typer.Option(help="The layout wished for from now on, e.g. dp=2,fsdp=2.")
    ],
    storage: Annotated[str, typer.Option(help=STORAGE_HELP)] = "runs",
) -> None:
    """Change the layout of RUN at its next step boundary; nothing is redone."""
    from pipelines.run.reshard import reshard

    typer.echo(reshard(run, layout, storage))


@app.command(name="export")
def export_command(
    run: Annotated[str, typer.Argument(help="The name of a run that has a checkpoint.")],
    storage: Annotated[str, typer.Option(help=STORAGE_HELP)] = "runs",
    format_: Annotated[
        Literal["hf"], typer.Option("--format", help="hf: a folder that `transformers` loads.")
    ] = "hf",
    out: Annotated[
        Path | None, typer.Option(help="The new folder; default: the run's name and '-hf'.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="Which checkpoint; default: the newest.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Of the parameters; default: as the run keeps them."),
    ] = None,
) -> None:
    """Write a checkpoint of RUN to a folder that other tools load."""
    from pipelines.hugging_face.export import export

    typer.echo(export(run, storage, out, step, dtype))


@app.command(name="prepare")
def prepare_command(
    data: Annotated[
        str, typer.Argument(help="Text: a folder, file or glob; '' is the standard library.")
    ],
    out: Annotated[
        str, typer.Argument(help="The folder for the token shards, or its URL, e.g. s3://bucket/x.")
    ],
    tokenizer: Annotated[
        str, typer.Option(help="'bytes', or a Hugging Face tokenizers JSON file.")
    ] = "bytes",
    separator: Annotated[
        str | None, typer.Option(help="The token that parts documents, if not the usual one.")
    ] = None,
    held_out_fraction: Annotated[
        float, typer.Option(help="Part of the documents held out.")
    ] = 0.02,
) -> None:
    """Turn text into memory-mapped token shards, to be given to --data."""
    from pipelines.data.corpus import find_corpus
    from pipelines.data.prepare import prepare_at
    from pipelines.data.tokens import find_tokenizer

    chosen = find_tokenizer(tokenizer, separator)
    index = prepare_at(find_corpus(data), out, chosen, held_out_fraction)
    counts = ", ".join(
        f"{name}: {split.num_tokens:,} tokens" for name, split in index.splits.items()
    )
    typer.echo(f"{out}: {counts}; train on them with --data {out}")


@app.command()
def plan(
    model_params: Annotated[
        float, typer.Option(metavar="NUMBER", help="How many parameters the model has, e.g. 7e9.")
    ],
    world_sizes: Annotated[
        str, typer.Option(help="Numbers of workers that share the state.")
    ] = "1,8,64,512",
) -> None:
    """Print the memory that training takes, by precision, ZeRO stage and number of workers."""
    from pipelines.observe.view.footprint_table import footprint_tables, parse_counts

    if not 1 <= model_params < float("inf"):
        raise UserError(f"--model-params {model_params:g}: a number of parameters, e.g. 7e9")
    for formula, table in footprint_tables(model_params, parse_counts(world_sizes)):
        Console(soft_wrap=True).print(formula, highlight=False)
        Console().print(table)


@app.command(name="doctor")
def doctor_command(
    storage: Annotated[str, typer.Option(help=STORAGE_HELP)] = "runs",
    tracking_uri: TrackingUri = None,
    data: Data = None,
    interface: Interface = None,
    ports: Ports = None,
    run: Annotated[
        str | None, typer.Argument(help="Check the files of this run instead of the machine.")
    ] = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Set damaged files of RUN aside, so that it can continue."),
    ] = False,
) -> None:
    """Check this machine and the cluster at hand, or the files of RUN, and report problems."""
    from pipelines.doctor import DoctorRequest, check_run, doctor

    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    if run is not None:
        raise typer.Exit(check_run(run, storage, repair, console))
    if repair:
        raise UserError("--repair: name the run, e.g. elastic doctor RUN --repair")
    raise typer.Exit(doctor(DoctorRequest(storage, tracking_uri, data, interface, ports), console))


def main() -> None:
    """The `elastic` command. Exit codes: 0, 1 failed, 2 user error, 130 and 143 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what users raise may have lone surrogates in it
            stream.reconfigure(errors="backslashreplace")
    try:
        for argument in sys.argv[1:]:
            refuse_undecodable("the argument", argument)
        sys.exit(app(standalone_mode=False) or 0)
    except UserError as error:
        if isinstance(error, UserCodeFailed) and error.frames:
            print(error.frames, end="", file=sys.stderr)
        print(f"elastic: {' '.join(str(error).splitlines())}", file=sys.stderr)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        print(_misuse(error), file=sys.stderr)
    sys.exit(USER_ERROR)


def _misuse(error: Any) -> str:
    """What the parser of the command line (click's, whichever copy of it) says, in one line; where
    nothing was asked for, that is the help."""
    message = error.format_message()
    if "\n\n" in message:
        return str(message)
    context = getattr(error, "ctx", None)
    more = f" (see {context.command_path} --help)" if context else ""
    return f"elastic: {' '.join(message.split())}{more}"
