"""The command line: `elastic` train, status, logs, sweep, reshard, export, prepare, convert, plan,
simulate, doctor.

The only file that imports inside functions, so that `elastic status` does not load torch, Ray or
MLflow.
"""

from __future__ import annotations

import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from actors.runtime.factory import quick_imports
from pipelines.cli_options import (
    AuditEvery,
    Callbacks,
    Changes,
    Data,
    Detach,
    DryRun,
    FaultOptions,
    InProcess,
    Interface,
    NotifyUrl,
    Ports,
    Prices,
    Profile,
    RecipeName,
    ScriptWords,
    TrackingUri,
    Workers,
)
from pipelines.cli_plan import PlanWords, add_plan
from pipelines.cli_simulate import add_simulate
from pipelines.errors import UserCodeFailed, UserError, refuse_undecodable
from pipelines.simulation.request import SimulateRequest

if TYPE_CHECKING:
    from pipelines.run.plan import TrainRequest

app = typer.Typer(
    help="Elastic distributed training: a run continues when workers die, leave or join.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

USER_ERROR = 2
STORAGE_HELP = "Folder or URL that holds the runs, e.g. s3://bucket/runs."
TABLE_WIDTH = 110
"""Width in characters when the output is not a terminal."""


@app.callback()
def elastic() -> None:
    """Elastic distributed training: a run continues when workers die, leave or join."""


@app.command()
def train(
    recipe: RecipeName,
    words: ScriptWords = None,
    run_name: Annotated[
        str | None, typer.Option(help="Name of the run; an existing name resumes it.")
    ] = None,
    storage: Annotated[str, typer.Option(help=STORAGE_HELP)] = "runs",
    workers: Workers = None,
    layout: Annotated[str | None, typer.Option(help="Target layout, e.g. dp=2,fsdp=2.")] = None,
    steps: Annotated[int | None, typer.Option(help="Stop after this step.")] = None,
    data: Data = None,
    set_: Changes = None,
    audit_every: AuditEvery = None,
    inject: FaultOptions = None,
    record_samples: Annotated[
        bool, typer.Option("--record-samples", help="Log the sample ids of each rank.")
    ] = False,
    tracking_uri: TrackingUri = None,
    experiment: Annotated[str, typer.Option(help="MLflow experiment.")] = "elastic",
    interface: Interface = None,
    ports: Ports = None,
    notify: NotifyUrl = None,
    callback: Callbacks = None,
    detach: Detach = False,
    profile: Profile = None,
    in_process: InProcess = False,
    dry_run_: DryRun = False,
) -> None:
    """Train RECIPE, or resume the run named by --run-name."""
    from pipelines.run.refusals import give_words, refuse_early

    refuse_early(recipe, set_ or (), workers, layout)
    give_words(recipe, words or [])
    with quick_imports():
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
        callbacks=tuple(callback or ()),
        detach=detach,
        profile=profile,
    )
    raise typer.Exit(_train(request, dry_run_, in_process))


def _train(request: TrainRequest, is_dry_run: bool, is_in_process: bool) -> int:
    if is_dry_run:
        from pipelines.run.dry_run import dry_run

        return dry_run(request, _console_for_tables())
    if is_in_process:
        from pipelines.run.in_process import train_in_process

        return train_in_process(request, Console())
    with quick_imports():
        from pipelines.run.drive import drive
    return drive(request, Console())


@app.command(name="status")
def status_command(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    storage: Annotated[str, typer.Option(help=STORAGE_HELP)] = "runs",
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh the status until the run is no longer driven.")
    ] = False,
    json_: Annotated[
        bool,
        typer.Option("--json", help="Print JSON objects; docs/files.md lists the keys."),
    ] = False,
    price: Prices = None,
) -> None:
    """Show phase, workers, checkpoint and goodput of RUN."""
    from pipelines.observe.view.status import status

    raise typer.Exit(status(run, storage, price or (), watch, json_, _console_for_tables()))


@app.command(name="logs")
def logs_command(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    worker: Annotated[str, typer.Option(help="Name of the worker as in `elastic status`.")],
    storage: Annotated[str, typer.Option(help=STORAGE_HELP)] = "runs",
) -> None:
    """Print the output and the exceptions of one worker of RUN."""
    from pipelines.observe.view.logs import logs

    for line in logs(run, worker, storage):
        typer.echo(line)


@app.command(name="sweep")
def sweep_command(
    recipe: RecipeName,
    layouts: Annotated[
        str, typer.Option(metavar="LAYOUTS", help="Separated by semicolons: 'tp=1; dp=2,tp=2'.")
    ],
    steps: Annotated[int, typer.Option(help="Steps per layout; the first is not measured.")] = 10,
    start_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Skip a layout whose workers start later than this."),
    ] = 600.0,
    storage: Annotated[str, typer.Option(help=STORAGE_HELP)] = "runs",
    data: Data = None,
    set_: Changes = None,
) -> None:
    """Measure speed and memory of RECIPE under several layouts."""
    from pipelines.run.refusals import refuse_early

    refuse_early(recipe, set_ or ())
    from pipelines.run.plan import TrainRequest
    from pipelines.run.sweep import SweepRequest, sweep

    train = TrainRequest(
        recipe=recipe, storage=storage, steps=steps, data=data, changes=tuple(set_ or ())
    )
    raise typer.Exit(sweep(SweepRequest(train, layouts, start_timeout), _console_for_tables()))


@app.command(name="reshard")
def reshard_command(
    run: Annotated[str, typer.Argument(help="Name of a run in progress.")],
    layout: Annotated[str, typer.Option(help="The new target layout, e.g. dp=2,fsdp=2.")],
    storage: Annotated[str, typer.Option(help=STORAGE_HELP)] = "runs",
) -> None:
    """Change the layout of RUN at its next step boundary."""
    from pipelines.run.reshard import reshard

    typer.echo(reshard(run, layout, storage))


@app.command(name="export")
def export_command(
    run: Annotated[str, typer.Argument(help="Name of a run that has a checkpoint.")],
    storage: Annotated[str, typer.Option(help=STORAGE_HELP)] = "runs",
    format_: Annotated[
        Literal["hf"], typer.Option("--format", help="hf: a folder that `transformers` loads.")
    ] = "hf",
    out: Annotated[Path | None, typer.Option(help="Folder to create. Default: RUN-hf.")] = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="Step of the checkpoint. Default: the newest.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Data type of the parameters. Default: that of the run."),
    ] = None,
) -> None:
    """Convert a checkpoint of RUN to a Hugging Face model folder."""
    from pipelines.hugging_face.weights.export import export

    typer.echo(export(run, storage, out, step, dtype))


@app.command(name="prepare")
def prepare_command(
    data: Annotated[
        str, typer.Argument(help="Text: a folder, file or glob; '' is Python's standard library.")
    ],
    out: Annotated[
        str, typer.Argument(help="Folder or URL for the token shards, e.g. s3://bucket/x.")
    ],
    tokenizer: Annotated[
        str, typer.Option(help="'bytes', or a JSON file of Hugging Face tokenizers.")
    ] = "bytes",
    separator: Annotated[
        str | None, typer.Option(help="Token between documents. Default: the tokenizer's.")
    ] = None,
    held_out_fraction: Annotated[
        float, typer.Option(help="Fraction of the documents held out for evaluation.")
    ] = 0.02,
) -> None:
    """Tokenize text into memory-mapped token shards for --data."""
    from pipelines.data.corpus import find_corpus
    from pipelines.data.prepare import prepare_at
    from pipelines.data.tokens import find_tokenizer

    chosen = find_tokenizer(tokenizer, separator)
    index = prepare_at(find_corpus(data), out, chosen, held_out_fraction)
    counts = ", ".join(
        f"{name}: {split.num_tokens:,} tokens" for name, split in index.splits.items()
    )
    typer.echo(f"{out}: {counts}; train on them with --data {out}")


@app.command(name="convert")
def convert_command(
    file: Annotated[str, typer.Argument(help="A DeepSpeed configuration, e.g. ds_config.json.")],
    world_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of GPUs of the DeepSpeed job."),
    ] = None,
    to: Annotated[
        Literal["settings", "loop"],
        typer.Option(help="settings: arguments of `elastic train`; loop: a Python module."),
    ] = "settings",
) -> None:
    """Translate a DeepSpeed configuration; report every key of it on stderr."""
    from pipelines.migration.convert import convert

    converted = convert(file, world_size, to)
    for line in converted.lines:
        typer.echo(line, err=True)
    typer.echo(converted.text)


def _plan(words: PlanWords) -> int:
    if words.recipe is None:
        from pipelines.observe.view.footprint_table import print_footprints

        print_footprints(words.model_params, words.world_sizes)
        return 0
    if words.model_params is not None:
        raise UserError("give RECIPE or --model-params, not both")
    from pipelines.run.refusals import refuse_early

    refuse_early(words.recipe, words.changes)
    with quick_imports():
        from pipelines.plan.device_options import DeviceFlags
        from pipelines.plan.plan_command import PlanRequest, plan_recipe

    request = PlanRequest(
        words.recipe,
        words.workers,
        DeviceFlags(words.device, *words.device_figures),
        words.prices,
        words.changes,
        words.layouts,
        words.efficiency,
        words.as_json,
        words.measured,
    )
    return plan_recipe(request, _console_for_tables())


add_plan(app, _plan)


def _simulate(request: SimulateRequest) -> int:
    from pipelines.simulation.simulate import simulate

    return simulate(request, _console_for_tables())


add_simulate(app, _simulate)


@app.command(name="doctor")
def doctor_command(
    storage: Annotated[str, typer.Option(help=STORAGE_HELP)] = "runs",
    tracking_uri: TrackingUri = None,
    data: Data = None,
    interface: Interface = None,
    ports: Ports = None,
    run: Annotated[
        str | None, typer.Argument(help="Check the files of this run instead of the environment.")
    ] = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Set damaged files of RUN aside so that it can resume."),
    ] = False,
) -> None:
    """Check the environment, or the files of RUN, and print fixes."""
    from pipelines.doctor import DoctorRequest, check_run, doctor

    console = _console_for_tables()
    if run is not None:
        raise typer.Exit(check_run(run, storage, repair, console))
    if repair:
        raise UserError("--repair needs the name of a run: elastic doctor RUN --repair")
    raise typer.Exit(doctor(DoctorRequest(storage, tracking_uri, data, interface, ports), console))


def _console_for_tables() -> Console:
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)


def main() -> None:
    """The `elastic` command.

    Exit codes: 0 completed, 1 failed, 2 user error, 130 and 143 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a user's message may hold lone surrogates
            stream.reconfigure(errors="backslashreplace")
    try:
        for argument in sys.argv[1:]:
            refuse_undecodable("argument", argument)
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
    """The message of the command-line parser (either copy of click) in one line; without a
    command, that is the help text."""
    message = error.format_message()
    if "\n\n" in message:
        return str(message)
    context = getattr(error, "ctx", None)
    more = f" (see {context.command_path} --help)" if context else ""
    return f"elastic: {' '.join(message.split())}{more}"
