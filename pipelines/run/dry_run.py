"""`elastic train --dry-run`: what a run would be, had and cost; nothing is started or written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from actors.storage.checkpoint_files import find_checkpoints
from actors.storage.lease import owner_of
from elastic.geometry.errors import Infeasible
from elastic.geometry.training_job import Capacity
from elastic.geometry.zero import PARTS, zero_in_step
from elastic.planner.layout_choice import plan_layout
from elastic.planner.memory_model import worker_bytes
from pipelines.data.opening import RANDOM, FoundData, find_data
from pipelines.data.packing import find_chats
from pipelines.observe.history.formatting import counted, quantity
from pipelines.observe.history.run_folder import RunFolder, named_storage
from pipelines.run.plan import RunPlan, TrainRequest, make_plan, settings_of
from pipelines.run.preflight import refuse_unstartable
from pipelines.settings import MlpSettings, TrainSettings
from pipelines.settings.errors import UserError

DryRunReport = Iterator[tuple[str, str]]


def dry_run(request: TrainRequest, console: Console) -> int:
    """Tell what the same command line would do without `--dry-run`; return 0.

    Raises `UserError` for all that `train` would refuse before it starts anything; what only
    the prepared data can tell (their length, whether a stored run read the same) is not known
    while they have yet to be prepared.
    """
    request.refuse_unreadable()
    settings, own = settings_of(request)
    reads_text = own is None and not isinstance(settings.model, MlpSettings)
    found = _data(request, settings) if reads_text else None
    is_there = found is None or found.is_there()
    plan = make_plan(request if is_there else _with_random_data(request), torch.cuda.device_count())
    refuse_unstartable(plan, request.detach)
    folder = RunFolder.of(plan.folder.storage, request.run_name or plan.folder.name)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for what, value in (
        *_of_the_run(plan, settings.data.seq_len if reads_text else 1),
        *_of_the_data(plan, settings, found),
        *_of_the_state(plan),
        *_of_the_workers(plan),
        *_of_the_past(folder),
        *_of_the_places(request, plan, folder),
    ):
        table.add_row(what, Text(value))
    console.print(table)
    console.print("a dry run: nothing was started or written", highlight=False)
    return 0


def _data(request: TrainRequest, settings: TrainSettings) -> FoundData:
    data = settings.data
    cache = request.data_cache or named_storage(request.storage).at("data").url
    how = (data.tokenizer, data.separator, data.held_out_fraction)
    if data.format == "chat" and data.source != RANDOM:
        return find_chats(data.source, cache, data.seq_len, *how)
    found = find_data(data.source, cache, *how)
    known = getattr(settings.model, "vocab_size", None)
    if found.tokenizer and known and found.tokenizer.vocab_size > known:
        raise UserError(
            f"model.vocab_size={known}, but the tokenizer has {found.tokenizer.vocab_size} tokens: "
            f"set model.vocab_size={found.tokenizer.vocab_size} or more"
        )
    return found


def _with_random_data(request: TrainRequest) -> TrainRequest:
    """The same model and workers, under a name that no stored run has."""
    return replace(request, data="random", run_name=None)


def _of_the_run(plan: RunPlan, seq_len: int) -> DryRunReport:
    settings = plan.settings
    yield "recipe", f"{plan.recipe['recipe']}, {settings.dtype}, seed {settings.seed}"
    num, what = settings.batch * seq_len, "tokens" if seq_len > 1 else "samples"
    yield (
        "steps",
        f"{settings.steps:,} of {counted(settings.batch, 'sample')}, {settings.microbatch} a "
        f"microbatch: {quantity(num)} {what} a step, {quantity(num * settings.steps)} in all",
    )


def _of_the_data(plan: RunPlan, settings: TrainSettings, found: FoundData | None) -> DryRunReport:
    source = settings.data.source or "the Python standard library"
    samples = plan.recipe["num_samples"]
    epochs = f"{settings.steps * settings.batch / samples:.3g} epochs"
    if found is None:
        yield "data", f"{samples:,} samples, which the recipe brings, {epochs}"
        yield "", f"digest {plan.recipe['data_digest']}"
    elif found.corpus is not None and not found.is_there():
        size = sum(file.stat().st_size for file in found.corpus.files)
        yield "data", f"{source}: {counted(len(found.corpus.files), 'file')}, {quantity(size)}B"
        yield "", f"would be prepared first, by the tokenizer {settings.data.tokenizer}"
    else:
        source = "random tokens" if found.place is None else source
        samples = plan.recipe["num_samples"]
        epochs = settings.steps * settings.batch / samples
        yield (
            "data",
            f"{source}: {samples:,} samples of {settings.data.seq_len} tokens, {epochs:.3g} epochs",
        )
        yield "", f"digest {plan.recipe['data_digest']}"


def _of_the_state(plan: RunPlan) -> DryRunReport:
    job = plan.run.opening.job
    yield (
        "state",
        f"parameters {quantity(job.param_bytes)}B, with the optimizer's "
        f"{quantity(job.state_bytes)}B, and gradients {quantity(job.param_bytes)}B",
    )


def _of_the_workers(plan: RunPlan) -> DryRunReport:
    """The layout at the most and at the fewest workers, and what one of them needs."""
    opening, settings = plan.run.opening, plan.settings
    memory = torch.cuda.get_device_properties(0).total_memory if plan.use_gpus else None
    policy = opening.policy
    for number in dict.fromkeys((policy.max_workers, policy.min_workers)):
        chosen = plan_layout(
            None,
            Capacity(number, memory),
            opening.target_layout,
            opening.job,
            bool(settings.snapshot_every),
        )
        what = counted(number, "worker")
        if isinstance(chosen, Infeasible):
            yield what, f"no layout: {chosen.reason}"
            continue
        layout = chosen.layout
        needed = worker_bytes(opening.job, layout)
        yield what, str(layout)
        divided = PARTS[: zero_in_step(layout.zero, layout.pp)] if layout.fsdp > 1 else ()
        told = f", of {', '.join(divided)} a part each" if divided else ""
        room = f" of {quantity(memory)}B" if memory else ""
        yield (
            "",
            f"{quantity(needed)}B of parameters, gradients and optimizer a worker{told}; with "
            f"the margin {quantity(ceil(needed * opening.job.margin))}B{room}, activations apart",
        )
        yield "", chosen.reason


def _of_the_past(folder: RunFolder) -> DryRunReport:
    """What would be resumed."""
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
        yield "resumes", f"'{folder.name}' from step 0: it has no whole checkpoint"
    if owner:
        yield (
            "",
            f"it would be refused now: process {owner.get('pid')} on {owner.get('host')} drives "
            "this run",
        )


def _of_the_places(request: TrainRequest, plan: RunPlan, folder: RunFolder) -> DryRunReport:
    yield "writes", folder.url
    yield "", f"MLflow: {plan.tracking_uri}, experiment {request.experiment}"
