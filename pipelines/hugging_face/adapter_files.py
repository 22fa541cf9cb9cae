"""The adapters of a run as a folder that `peft` loads."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from pipelines.errors import UserError
from pipelines.hugging_face.adapters import adapter_config, add_adapters, file_name, is_adapter
from pipelines.hugging_face.building import build
from pipelines.hugging_face.own_names import whole
from pipelines.hugging_face.shards import write_shard
from pipelines.hugging_face.source import Source
from pipelines.settings import HuggingFaceSettings

TENSORS = "adapter_model.safetensors"


def write_adapter(folder: Path, source: Source, dtype: torch.dtype, window_bytes: int) -> str:
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
