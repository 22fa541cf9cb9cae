"""Export: writes a checkpoint of any layout as a folder that `transformers` or `peft` loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from actors.storage.checkpoint_files import find_checkpoints
from actors.storage.errors import DamagedCheckpoint
from actors.storage.storage import make_durable, open_storage
from pipelines.errors import UserError
from pipelines.hugging_face.adapters import adapter_config, add_adapters, file_name, is_adapter
from pipelines.hugging_face.building import build
from pipelines.hugging_face.configuration import CONFIG, config_of
from pipelines.hugging_face.tensor_files import INDEX, ONE_FILE
from pipelines.hugging_face.vocabulary import vocabulary_of, write_vocabulary
from pipelines.hugging_face.weights.names import (
    StoredTensor,
    auxiliary_files,
    hugging_face_tensors,
    stored_config,
    stored_whole,
    transformer_tensors,
)
from pipelines.hugging_face.weights.shards import RegionReader, deal, write_shard
from pipelines.observe.history.run_folder import RunFolder, find_run, refuse_other_format
from pipelines.settings import HuggingFaceSettings, TrainSettings, TransformerSettings
from pipelines.settings.home import expand_home
from pipelines.training.checkpoint.reader import Checkpoint
from pipelines.training.workload.state import stored_dtype

ADAPTER_FILE = "adapter_model.safetensors"
SHARD_BYTES = 10**9
WINDOW_BYTES = 1 << 27


@dataclass(frozen=True)
class ExportSource:
    """A checkpoint to export: the run's settings, a step, and a reader of its regions.

    `data_folder` is the path or URL of the run's prepared data (None: random tokens).
    """

    settings: TrainSettings
    data_folder: str | None
    step: int
    read: RegionReader


def export(
    run_name: str,
    storage: str | Path,
    out: Path | None = None,
    step: int | None = None,
    dtype: str | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
    window_bytes: int = WINDOW_BYTES,
) -> str:
    """Write the parameters of a run's checkpoint to the folder `out`; return a one-line summary.

    If None, `step` is the newest checkpoint's, and `dtype` that in which the run keeps parameters.
    Memory holds a few windows; files have about `shard_bytes`. Raises `UserError`.
    """
    out = expand_home(out or f"{run_name}-hf").resolve()
    _refuse_taken(out)
    source = open_source(run_name, storage, step)
    model = source.settings.model
    if not isinstance(model, TransformerSettings | HuggingFaceSettings):
        raise UserError(
            f"run '{run_name}' trains model.kind={model.kind}: `transformers` has no such model; "
            "only transformers can be exported"
        )
    out_dtype = getattr(torch, dtype) if dtype else stored_dtype(source.settings)
    vocabulary = vocabulary_of(source.settings.data, source.data_folder)
    dtype_name, seq_len = str(out_dtype).removeprefix("torch."), source.settings.data.seq_len
    if isinstance(model, HuggingFaceSettings) and source.settings.lora.rank:
        with _draft_of(out) as draft:
            contents = write_adapter(draft, source, out_dtype, window_bytes)
        return f"{out}: run {run_name} at step {source.step} as {contents} of {dtype_name}"
    if isinstance(model, HuggingFaceSettings):
        config, tensors = stored_config(model, dtype_name), hugging_face_tensors(model)
    else:
        config = config_of(model, dtype_name, seq_len, vocabulary.separator)
        tensors = transformer_tensors(model)
    with _draft_of(out) as draft:
        (draft / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        copied = auxiliary_files(source.settings)
        if not copied:
            write_vocabulary(draft, vocabulary, seq_len)
        for file in copied:
            shutil.copyfile(file, draft / file.name)
        num_bytes = _write_tensors(draft, tensors, out_dtype, source, shard_bytes, window_bytes)
    [architecture] = config["architectures"]
    line = (
        f"{out}: run {run_name} at step {source.step} as {architecture}, "
        f"{num_bytes / 1e6:,.1f} MB of {dtype_name}"
    )
    reason = "" if copied else vocabulary.missing_reason
    return line + (f"; no tokenizer: {reason}" if reason else "")


def open_source(run_name: str, storage: str | Path, step: int | None = None) -> ExportSource:
    """A run's checkpoint of a step (None: the newest). Raises `UserError` if there is none."""
    run = find_run(run_name, storage)
    recipe = run.recipe()
    assert recipe is not None
    refuse_other_format(run, recipe)
    checkpoint_step, read = _open_checkpoint(run, step)
    return ExportSource(
        TrainSettings.model_validate(recipe["settings"]),
        recipe["data_folder"],
        checkpoint_step,
        read,
    )


def _open_checkpoint(run: RunFolder, step: int | None) -> tuple[int, RegionReader]:
    """The step of a checkpoint and a reader of its regions.

    If a step was computed again after a rollback, its last checkpoint is taken.
    """
    checkpoints = {saved.step: saved for saved in find_checkpoints(run.files).whole}
    chosen = max(checkpoints, default=None) if step is None else step
    if chosen is None or chosen not in checkpoints:
        wanted = "complete checkpoint" if step is None else f"checkpoint of step {step}"
        steps = ", ".join(map(str, checkpoints)) or "none"
        raise UserError(
            f"run '{run.name}' in {run.storage} has no {wanted}; steps with one: {steps}"
        )
    others = ", ".join(str(other) for other in checkpoints if other != chosen) or "none"

    @contextmanager
    def other_steps_named() -> Iterator[None]:
        try:
            yield
        except DamagedCheckpoint as error:
            raise UserError(f"{error}; export another --step (there are: {others})") from None

    with other_steps_named():
        checkpoint = Checkpoint(open_storage(checkpoints[chosen].path))
    return chosen, other_steps_named()(checkpoint.read)


def write_adapter(folder: Path, source: ExportSource, dtype: torch.dtype, window_bytes: int) -> str:
    """Write `adapter_config.json` and one file of tensors; return a short description of them.

    Raises `UserError`.
    """
    settings, model = source.settings, source.settings.model
    if not isinstance(model, HuggingFaceSettings):
        raise UserError(f"a run of model.kind={model.kind} has no adapters")
    example = build(model.config)
    add_adapters(example, settings.lora)
    tensors = [
        stored_whole(name, tuple(parameter.shape), file_name(name))
        for name, parameter in example.named_parameters()
        if is_adapter(name)
    ]
    adapter_config(settings.lora, settings.init_from).save_pretrained(str(folder))
    write_shard(folder / ADAPTER_FILE, tensors, dtype, source.read, window_bytes)
    num_bytes = sum(dtype.itemsize * prod(tensor.shape) for tensor in tensors)
    return f"adapters to {settings.init_from}, {num_bytes / 1e6:,.1f} MB"


def _write_tensors(
    folder: Path,
    tensors: Sequence[StoredTensor],
    dtype: torch.dtype,
    source: ExportSource,
    shard_bytes: int,
    window_bytes: int,
) -> int:
    """Write one file, or several and their index; return the number of bytes of the tensors."""
    shards = deal(tensors, dtype.itemsize, shard_bytes)
    num_bytes = 0
    files: dict[str, str] = {}
    for number, members in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = name if len(shards) > 1 else ONE_FILE
        write_shard(folder / name, members, dtype, source.read, window_bytes)
        files |= dict.fromkeys((tensor.name for tensor in members), name)
        num_bytes += sum(dtype.itemsize * prod(tensor.shape) for tensor in members)
    if len(shards) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return num_bytes


def _refuse_taken(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"--out {out}: exists already; remove it, or name another folder")


@contextmanager
def _draft_of(out: Path) -> Iterator[Path]:
    """A folder beside `out` that is renamed to it when complete, and removed on failure."""
    draft = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        yield draft
        for path in (*draft.iterdir(), draft):
            make_durable(path)
        os.rename(draft, out)
    except OSError as error:
        raise UserError(
            f"--out {out}: cannot be written ({error.strerror}); name another folder"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # does not exist after the rename
