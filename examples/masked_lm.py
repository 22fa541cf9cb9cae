"""Masked language modelling with an encoder of transformers, such as BERT, from random values:

elastic train examples/masked_lm.py:recipe --workers 2
"""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import CONFIG_MAPPING, AutoModelForMaskedLM

from pipelines.settings import TrainSettings
from pipelines.settings.recipe import Recipe

BERT = {
    "model_type": "bert",
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MASK, LENGTH, IGNORED = 1, 16, -100


class Counts(Dataset):
    """Sequences that count up by a step of their own; 15 % of the tokens are masked."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        start, by = torch.randint(1, 8, (2,), generator=generator)
        tokens = 2 + (start + by * torch.arange(LENGTH)) % 62
        is_masked = torch.rand(LENGTH, generator=generator) < 0.15
        is_masked[0] = True
        return tokens.masked_fill(is_masked, MASK), tokens.masked_fill(~is_masked, IGNORED)


def loss(model, batch):
    tokens, targets = batch
    logits = model(tokens).logits.flatten(0, 1)
    total = cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()


def recipe_of(config, plan=None):
    """The recipe for a config of any encoder, and the layers that tp shards, if any."""

    def model():
        fields = dict(config)
        return AutoModelForMaskedLM.from_config(CONFIG_MAPPING[fields.pop("model_type")](**fields))

    return Recipe(
        model=model,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW([value for _, value in named], lr=1e-3),
        data=lambda: Counts(4096),
        plan=plan or {},
        settings=TrainSettings(batch=32, microbatch=8, steps=200),
    )


def recipe():
    layer = "bert.encoder.layer.*"
    plan = {f"{layer}.intermediate.dense": "colwise", f"{layer}.output.dense": "rowwise"}
    return recipe_of(BERT, plan)
