"""`elastic train --dry-run`: a report of steps, data, layouts, memory and paths of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from actors.ray_backend.cluster.connection import will_be_private
from actors.storage.checkpoint_files import find_checkpoints
from actors.storage.lease import owner_of
from elastic.geometry.errors import Infeasible
from elastic.geometry.training_job import Capacity
from elastic.geometry.zero import PARTS, zero_in_step
from elastic.planner.layout_choice import plan_layout
from elastic.planner.models.memory_model import worker_bytes
from elastic.planner.standbys import describe_standbys
from pipelines.data.opening import RANDOM, DataPlan, find_data
from pipelines.data.packing import find_chats
from pipelines.errors import UserError
from pipelines.observe.history.formatting import counted, quantity
from pipelines.observe.history.run_folder import RunFolder, named_storage
from pipelines.run.plan import RunPlan, TrainRequest, make_plan, settings_of
from pipelines.run.preflight import refuse_unstartable
from pipelines.settings import MlpSettings, TrainSettings

DryRunReport = Iterator[tuple[str, str]]


def dry_run(request: TrainRequest, console: Console) -> int:
    """Report what the same command line does without `--dry-run`; return 0.

    Nothing is started or written. Raises `UserError` for everything that `train` refuses before it
    starts anything. Checks that need prepared data (their length, whether a stored run read the
    same data) are skipped if the data have yet to be prepared.
    """
    request.refuse_unreadable()
    settings, custom = settings_of(request)
    reads_text = custom is None and not isinstance(settings.model, MlpSettings)
    found = _data(request, settings) if reads_text else None
    is_prepared = found is None or found.is_there()
    plan = make_plan(
        request if is_prepared else _with_random_data(request),
        torch.cuda.device_count(),
        not will_be_private(),
    )
    refuse_unstartable(plan, request.detach)
    folder = RunFolder.of(plan.folder.storage, request.run_name or plan.folder.name)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for label, value in (
        *_run_rows(plan, settings.data.seq_len if reads_text else 1),
        *_data_rows(plan, settings, found),
        *_state_rows(plan),
        *_worker_rows(plan),
        *_resume_rows(folder),
        *_path_rows(request, plan, folder),
        *(("note", note) for note in plan.notes),
    ):
        table.add_row(label, Text(value))
    console.print(table)
    console.print("dry run: nothing was started or written", highlight=False)
    return 0


def _data(request: TrainRequest, settings: TrainSettings) -> DataPlan:
    data = settings.data
    cache = request.data_cache or named_storage(request.storage).at("data").url
    tokenization = (data.tokenizer, data.separator, data.held_out_fraction)
    if data.format == "chat" and data.source != RANDOM:
        return find_chats(data.source, cache, data.seq_len, *tokenization)
    found = find_data(data.source, cache, *tokenization)
    vocab_size = getattr(settings.model, "vocab_size", None)
    if found.tokenizer and vocab_size and found.tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"model.vocab_size={vocab_size}, but the tokenizer has {found.tokenizer.vocab_size} "
            f"tokens: set model.vocab_size={found.tokenizer.vocab_size} or more"
        )
    return found


def _with_random_data(request: TrainRequest) -> TrainRequest:
    """The same request with random data and a new run name."""
    return replace(request, data="random", run_name=None)


def _run_rows(plan: RunPlan, seq_len: int) -> DryRunReport:
    settings = plan.settings
    yield "recipe", f"{plan.recipe['recipe']}, {settings.dtype}, seed {settings.seed}"
    num, unit = settings.batch * seq_len, "tokens" if seq_len > 1 else "samples"
    yield (
        "steps",
        f"{settings.steps:,} of {counted(settings.batch, 'sample')}, {settings.microbatch} per "
        f"microbatch: {quantity(num)} {unit} per step, {quantity(num * settings.steps)} in total",
    )


def _data_rows(plan: RunPlan, settings: TrainSettings, found: DataPlan | None) -> DryRunReport:
    source = settings.data.source or "the Python standard library"
    samples = plan.recipe["num_samples"]
    if found is None and not samples:
        yield "data", "a stream from the recipe, whose length is not known"
        yield "", f"digest {plan.recipe['data_digest']}"
    elif found is None:
        epochs = f"{settings.steps * settings.batch / samples:.3g} epochs"
        yield "data", f"{samples:,} samples from the recipe, {epochs}"
        yield "", f"digest {plan.recipe['data_digest']}"
    elif found.corpus is not None and not found.is_there():
        size = found.corpus.num_bytes()
        yield "data", f"{source}: {counted(len(found.corpus.files), 'file')}, {quantity(size)}B"
        yield "", f"to be prepared first, with the tokenizer {settings.data.tokenizer}"
    else:
        source = "random tokens" if found.place is None else source
        samples = plan.recipe["num_samples"]
        epochs = settings.steps * settings.batch / samples
        yield (
            "data",
            f"{source}: {samples:,} samples of {settings.data.seq_len} tokens, {epochs:.3g} epochs",
        )
        yield "", f"digest {plan.recipe['data_digest']}"


def _state_rows(plan: RunPlan) -> DryRunReport:
    job = plan.run.opening.job
    yield (
        "state",
        f"parameters {quantity(job.param_bytes)}B, parameters and optimizer "
        f"{quantity(job.state_bytes)}B, gradients {quantity(job.param_bytes)}B",
    )


def _worker_rows(plan: RunPlan) -> DryRunReport:
    """The layouts for the most and for the fewest workers, and the memory that one worker needs."""
    opening, settings = plan.run.opening, plan.settings
    memory = torch.cuda.get_device_properties(0).total_memory if plan.use_gpus else None
    policy = opening.policy
    for number in dict.fromkeys((policy.max_workers, policy.min_workers)):
        chosen = plan_layout(
            None,
            Capacity(number, memory),
            opening.target_layout,
            opening.job,
            bool(settings.snapshot.every),
        )
        label = counted(number, "worker")
        if isinstance(chosen, Infeasible):
            yield label, f"no layout: {chosen.reason}"
            continue
        layout = chosen.layout
        needed = worker_bytes(opening.job, layout)
        yield label, str(layout)
        num_standbys, num_microbatches = number - layout.num_workers, opening.job.num_microbatches
        if reason := describe_standbys(layout, num_standbys, num_microbatches):
            yield "", reason
        sharded = PARTS[: zero_in_step(layout.zero, layout.pp)] if layout.fsdp > 1 else ()
        sharding = f" ({', '.join(sharded)} sharded)" if sharded else ""
        device = f" of {quantity(memory)}B" if memory else ""
        yield (
            "",
            f"{quantity(needed)}B of parameters, gradients and optimizer per worker{sharding}; "
            f"{quantity(ceil(needed * opening.job.margin))}B{device} with the safety margin, "
            "activations not included",
        )
        yield "", chosen.reason


def _resume_rows(folder: RunFolder) -> DryRunReport:
    """The checkpoint that the run resumes from, and its current driver."""
    try:
        if folder.recipe() is None:
            yield "resumes", f"nothing: there is no run '{folder.name}' in {folder.storage}"
            return
        whole = find_checkpoints(folder.files).whole
        owner = owner_of(folder.files)
    except OSError as error:
        raise UserError(f"--storage {folder.storage}: cannot be read ({error})") from None
    if whole:
        yield "resumes", f"'{folder.name}' at step {whole[-1].step}, from {whole[-1].path}"
    else:
        yield "resumes", f"'{folder.name}' from step 0: it has no complete checkpoint"
    if owner:
        yield (
            "",
            f"refused at present: process {owner.get('pid')} on {owner.get('host')} drives this "
            "run",
        )


def _path_rows(request: TrainRequest, plan: RunPlan, folder: RunFolder) -> DryRunReport:
    yield "writes", folder.url
    yield "", f"MLflow: {plan.tracking_uri}, experiment {request.experiment}"
