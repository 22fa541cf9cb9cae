"""The recipe `hf:PATH`: a causal language model of `transformers`, from its folder or config."""

from __future__ import annotations

from pipelines.hugging_face.building import config_of_model, read_fields
from pipelines.hugging_face.tensor_files import has_weights
from pipelines.settings import (
    DataSettings,
    HuggingFaceSettings,
    OptimizerSettings,
    TrainSettings,
)

PREFIX = "hf:"
TOKENIZER = "tokenizer.json"


def hugging_face(path: str) -> TrainSettings:
    """Train the model in a folder on, with its weights and tokenizer if they are there; a
    `config.json` alone is begun anew. Raises `UserError`."""
    fields, folder = read_fields(path)
    config_of_model(fields)
    tokenizer = folder / TOKENIZER if folder else None
    has_tokenizer = tokenizer is not None and tokenizer.is_file()
    return TrainSettings(
        model=HuggingFaceSettings(config=fields),
        data=DataSettings(tokenizer=str(tokenizer) if has_tokenizer else "bytes"),
        optimizer=OptimizerSettings(lr=3e-4, warmup_steps=20, decay_steps=1000),
        init_from=str(folder) if folder and has_weights(folder) else None,
        batch=16,
        steps=200,
        checkpoint_every=100,
    )
