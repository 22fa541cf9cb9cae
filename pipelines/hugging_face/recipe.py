"""Recipes for `transformers` models: `hf:PATH` from a folder or config, and `finetune`."""

from __future__ import annotations

from typing import Any

from actors.storage.storage import is_remote
from pipelines.data.cache import local_folder
from pipelines.errors import UserError
from pipelines.hugging_face.building import config_of_model, read_fields
from pipelines.hugging_face.tensor_files import has_weights
from pipelines.settings import (
    CacheSettings,
    DataSettings,
    HuggingFaceSettings,
    OptimizerSettings,
    TrainSettings,
)

PREFIX = "hf:"
TOKENIZER = "tokenizer.json"


def finetune() -> TrainSettings:
    """Fine-tune a model on the responses in a JSONL file of conversations.

    `--set init_from=FOLDER` names the model; `--set lora.rank=8` trains adapters instead of its
    weights.
    """
    return TrainSettings(
        model=HuggingFaceSettings(),
        data=DataSettings(format="chat", seq_len=1024),
        optimizer=OptimizerSettings(lr=2e-5, warmup_steps=10, decay_steps=200, weight_decay=0.0),
        batch=16,
        steps=200,
        eval_every=50,
    )


def with_model_of_folder(settings: TrainSettings) -> TrainSettings:
    """The settings with an empty config and tokenizer filled in from the folder in `init_from`.

    Raises `UserError`.
    """
    model = settings.model
    if not isinstance(model, HuggingFaceSettings):
        if settings.lora.rank:
            raise UserError("lora.rank: only transformers models can have adapters; set 0")
        return settings
    if model.config:
        return settings
    if settings.init_from is None:
        raise UserError(
            "no model given: --set init_from=FOLDER, a folder that transformers has saved"
        )
    pretrained = hugging_face(settings.init_from)
    changes: dict[str, Any] = {"model": pretrained.model}
    if settings.data.tokenizer == "bytes":
        tokenizer = {"tokenizer": pretrained.data.tokenizer}
        changes["data"] = settings.data.model_copy(update=tokenizer)
    return settings.model_copy(update=changes)


def hugging_face(path: str) -> TrainSettings:
    """Continue to train the model in a folder, with its weights and tokenizer if it has them.

    The folder may be at a URL. A `config.json` alone is trained from scratch. Raises `UserError`.
    """
    is_at_url = is_remote(path)
    fields, folder = read_fields(str(local_folder(path, CacheSettings())) if is_at_url else path)
    config_of_model(fields)
    tokenizer = folder / TOKENIZER if folder else None
    has_tokenizer = tokenizer is not None and tokenizer.is_file()
    return TrainSettings(
        model=HuggingFaceSettings(config=fields),
        data=DataSettings(tokenizer=str(tokenizer) if has_tokenizer else "bytes"),
        optimizer=OptimizerSettings(lr=3e-4, warmup_steps=20, decay_steps=1000),
        init_from=(path if is_at_url else str(folder)) if folder and has_weights(folder) else None,
        batch=16,
        steps=200,
    )
