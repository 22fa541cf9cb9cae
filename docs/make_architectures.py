"""Generator of the tables in `docs/architectures.md`: the axes over which each model trains.

python docs/make_architectures.py            writes the page
python docs/make_architectures.py --check    exits with 1 if the page is out of date
"""

from __future__ import annotations

import os
import sys

from generated import ROOT, keep

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
sys.path.insert(0, str(ROOT))  # the examples are not installed

import torch

from examples.masked_lm import recipe_of
from pipelines.hugging_face.architectures import (
    CAUSAL,
    ENCODERS,
    encoder_fields,
    encoder_refusals,
    refusals,
    sees_documents,
    table,
)

PAGE = ROOT / "docs" / "architectures.md"
SHORT = {
    "no tensor parallel plan": "no plan",
    "no pipeline plan": "no plan",
    "shards none of its layers": "only experts in its plan",
    "has no experts": "no experts",
    "sliding_window=": "sliding window",
    "its layers have": "not only attention",
    "mix tokens without": "own attention",
    "its attention cannot be replaced": "own attention",
    "has no plan for tp": "fused layers",
    "does not list the blocks": "no chain of blocks",
    "which dims of its batch": "recipe",
    "which of a recipe's modules": "recipe",
}
"""The cell of the table by a part of the reason."""


def causal() -> str:
    text = table({family: refusals(family) for family in CAUSAL}, SHORT)
    across = ", ".join(f"`{family}`" for family in CAUSAL if not sees_documents(family))
    return f"{text}\n\nWith `--set data.attend_across_documents=true`: {across}."


def encoders() -> str:
    rows = {}
    for family in ENCODERS:
        with torch.device("meta"):
            model = recipe_of(encoder_fields(family)).model()
        rows[family] = encoder_refusals(model, family)
    return table(rows, SHORT)


if __name__ == "__main__":
    keep(PAGE, {"causal": causal(), "encoders": encoders()})
