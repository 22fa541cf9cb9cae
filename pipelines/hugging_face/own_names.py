"""What a folder has of a model that `transformers` itself has built: tensors by its own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from elastic.regions import Region
from pipelines.hugging_face.building import build
from pipelines.hugging_face.names import Part, Whole
from pipelines.settings import HuggingFaceSettings, TrainSettings
from pipelines.training.state import buffers

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def own_tensors(model: HuggingFaceSettings) -> list[Whole]:
    """Each parameter once, however many names it has, and each buffer that is state."""
    return [whole(name, tuple(shape)) for name, shape in _shapes(build(model.config)).items()]


def whole(name: str, shape: tuple[int, ...], stored_as: str | None = None) -> Whole:
    """A tensor of ours that lies there whole."""
    return Whole(stored_as or name, shape, (Part(name, Region.whole(shape)),))


def stored_config(model: HuggingFaceSettings, dtype: str) -> dict[str, Any]:
    """The `config.json` that the run was given, in the dtype of what is written."""
    architecture = type(build(model.config)).__name__
    return model.config | {"architectures": [architecture], "dtype": dtype, "torch_dtype": dtype}


def files_beside(settings: TrainSettings) -> list[Path]:
    """The tokenizer's and others that the folder had which the run began with."""
    if not isinstance(settings.model, HuggingFaceSettings) or settings.init_from is None:
        return []
    files = (Path(settings.init_from) / name for name in TOKENIZER_FILES)
    return [file for file in files if file.is_file()]


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    named = [*model.named_parameters(), *buffers(model)]
    return {name: tuple(value.shape) for name, value in named}
