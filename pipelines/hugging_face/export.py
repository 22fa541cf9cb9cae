"""Export: a checkpoint, whatever layout wrote it, becomes a folder that `transformers` loads."""

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
from pipelines.hugging_face.adapters import adapter_config, add_adapters, file_name, is_adapter
from pipelines.hugging_face.building import build
from pipelines.hugging_face.configuration import CONFIG, config_of
from pipelines.hugging_face.names import (
    Whole,
    files_beside,
    own_tensors,
    stored_config,
    their_tensors,
    whole,
)
from pipelines.hugging_face.shards import RegionReader, deal, write_shard
from pipelines.hugging_face.tensor_files import INDEX, ONE_FILE
from pipelines.hugging_face.vocabulary import vocabulary_of, write_vocabulary
from pipelines.observe.history.run_folder import RunFolder, find_run
from pipelines.settings import HuggingFaceSettings, TrainSettings, TransformerSettings
from pipelines.settings.errors import UserError
from pipelines.settings.home import expanded
from pipelines.training.checkpoint.reader import Checkpoint
from pipelines.training.workload.state import stored_dtype


@dataclass(frozen=True)
class ExportSource:
    """A run's settings, where its prepared data lie (path or URL; None: random), and a step."""

    settings: TrainSettings
    data_folder: str | None
    step: int
    read: RegionReader


def open_source(run_name: str, storage: str | Path, step: int | None = None) -> ExportSource:
    """A run's checkpoint of a step, or the newest. Raises `UserError` if there is none."""
    run = find_run(run_name, storage)
    recipe = run.recipe()
    assert recipe is not None
    found_step, read = _open_checkpoint(run, step)
    return ExportSource(
        TrainSettings.model_validate(recipe["settings"]),
        recipe["data_folder"],
        found_step,
        read,
    )


def _open_checkpoint(run: RunFolder, step: int | None) -> tuple[int, RegionReader]:
    """Its step, and what reads regions from it; of a step that was redone the last."""
    there = {saved.step: saved for saved in find_checkpoints(run.files).whole}
    wanted = max(there, default=None) if step is None else step
    if wanted is None or wanted not in there:
        told = "that is whole" if step is None else f"of step {step}"
        steps = ", ".join(map(str, there)) or "none"
        raise UserError(
            f"run '{run.name}' in {run.storage} has no checkpoint {told}; there are: {steps}"
        )
    others = ", ".join(str(one) for one in there if one != wanted) or "none"

    @contextmanager
    def telling_of_others() -> Iterator[None]:
        try:
            yield
        except DamagedCheckpoint as error:
            raise UserError(f"{error}; export another --step (there are: {others})") from None

    with telling_of_others():
        checkpoint = Checkpoint(open_storage(there[wanted].path))
    return wanted, telling_of_others()(checkpoint.read)


TENSORS = "adapter_model.safetensors"


def write_adapter(folder: Path, source: ExportSource, dtype: torch.dtype, window_bytes: int) -> str:
    """Write `adapter_config.json` and one file of tensors; returns what there is of them. Raises
    `UserError`."""
    settings, model = source.settings, source.settings.model
    if not isinstance(model, HuggingFaceSettings):
        raise UserError(f"a run of model.kind={model.kind} has no adapters")
    example = build(model.config)
    add_adapters(example, settings.lora)
    tensors = [
        whole(name, tuple(one.shape), file_name(name))
        for name, one in example.named_parameters()
        if is_adapter(name)
    ]
    adapter_config(settings.lora, settings.init_from).save_pretrained(str(folder))
    write_shard(folder / TENSORS, tensors, dtype, source.read, window_bytes)
    num_bytes = sum(dtype.itemsize * prod(tensor.shape) for tensor in tensors)
    return f"adapters to {settings.init_from}, {num_bytes / 1e6:,.1f} MB"


SHARD_BYTES = 10**9

WINDOW_BYTES = 1 << 27


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
    """Write the parameters of a run's checkpoint to the folder `out`; return one line about it.

    `step` is the newest, `dtype` the one that the run keeps, if they are None. Memory is that of a
    few windows, files are of about `shard_bytes`. Raises `UserError`.
    """
    out = expanded(out or f"{run_name}-hf").resolve()
    _refuse_taken(out)
    source = open_source(run_name, storage, step)
    model = source.settings.model
    if not isinstance(model, TransformerSettings | HuggingFaceSettings):
        raise UserError(
            f"run '{run_name}' trains model.kind={model.kind}: `transformers` has no such model, "
            "only transformers are exported"
        )
    kept = getattr(torch, dtype) if dtype else stored_dtype(source.settings)
    vocabulary = vocabulary_of(source.settings.data, source.data_folder)
    name_of_dtype, seq_len = str(kept).removeprefix("torch."), source.settings.data.seq_len
    if isinstance(model, HuggingFaceSettings) and source.settings.lora.rank:
        with _draft_of(out) as draft:
            told = write_adapter(draft, source, kept, window_bytes)
        return f"{out}: run {run_name} at step {source.step} as {told} of {name_of_dtype}"
    if isinstance(model, HuggingFaceSettings):
        config, tensors = stored_config(model, name_of_dtype), own_tensors(model)
    else:
        config = config_of(model, name_of_dtype, seq_len, vocabulary.separator)
        tensors = their_tensors(model)
    with _draft_of(out) as draft:
        (draft / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        beside = files_beside(source.settings)
        if not beside:
            write_vocabulary(draft, vocabulary, seq_len)
        for file in beside:
            shutil.copyfile(file, draft / file.name)
        num_bytes = _write_tensors(draft, tensors, kept, source, shard_bytes, window_bytes)
    [architecture] = config["architectures"]
    line = (
        f"{out}: run {run_name} at step {source.step} as {architecture}, "
        f"{num_bytes / 1e6:,.1f} MB of {name_of_dtype}"
    )
    lacking = "" if beside else vocabulary.lacking
    return line + (f"; no tokenizer: {lacking}" if lacking else "")


def _write_tensors(
    folder: Path,
    wholes: Sequence[Whole],
    dtype: torch.dtype,
    source: ExportSource,
    shard_bytes: int,
    window_bytes: int,
) -> int:
    """One file, or several and their index; returns how many bytes of tensors there are."""
    shards = deal(wholes, dtype.itemsize, shard_bytes)
    num_bytes, files = 0, {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = name if len(shards) > 1 else ONE_FILE
        write_shard(folder / name, tensors, dtype, source.read, window_bytes)
        files |= dict.fromkeys((tensor.name for tensor in tensors), name)
        num_bytes += sum(dtype.itemsize * prod(tensor.shape) for tensor in tensors)
    if len(shards) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return num_bytes


def _refuse_taken(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"--out {out}: is there already; remove it, or name another folder")


@contextmanager
def _draft_of(out: Path) -> Iterator[Path]:
    """A folder beside `out` that is renamed to it when whole, and removed if that fails."""
    draft = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        yield draft
        for path in (*draft.iterdir(), draft):
            make_durable(path)
        os.rename(draft, out)
    except OSError as error:
        raise UserError(
            f"--out {out}: cannot be written ({error.strerror}); name a folder that can"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # after the rename there is none
