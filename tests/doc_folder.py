"""The working folder of a reader: the files that the pages of the documentation name."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from doc_pages import PAGES, ROOT, blocks

NUM_ROWS = 8
NUM_CHATS = 64
VOCABULARY = 264
"""Of the tiny models: bytes, the separator, and room to divide evenly."""


def make_folder(folder: Path, page: Path) -> None:
    """Write what the commands and the Python blocks of a page read. No network is used."""
    text = page.read_text()
    (folder / "examples").symlink_to(ROOT / "examples")
    for source in (*reversed(PAGES), page):  # the page's own files replace those of others
        for block in blocks(source):
            if block.title:
                (folder / block.title).write_text(block.code)
    _write_texts(folder / "texts")
    if "chats.jsonl" in text:
        _write_chats(folder / "chats.jsonl")
    if "ArrowDataset" in text:
        _write_rows(folder)
    if "models/" in text:
        _write_models(folder / "models")


def _write_texts(folder: Path) -> None:
    (folder / "more").mkdir(parents=True)
    sentence = "The global batch is constant, so the loss curve does not depend on the workers. "
    (folder / "one.txt").write_text(sentence * 400)
    (folder / "more" / "two.txt").write_text(sentence[::-1] * 100)
    (folder / "three.jsonl").write_text(json.dumps({"text": sentence * 40}) + "\n")


def _write_chats(file: Path) -> None:
    pairs = ({"prompt": f"After {i}?", "response": f"{i + 1}."} for i in range(NUM_CHATS))
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def _write_rows(folder: Path) -> None:
    images = pa.array([[float(i)] * 4 for i in range(NUM_ROWS)], pa.list_(pa.float32()))
    table = pa.table({"image": images, "label": pa.array(range(NUM_ROWS), pa.int64())})
    (folder / "data").mkdir()
    pq.write_table(table, folder / "data" / "rows.parquet")
    with (
        pa.OSFile(str(folder / "more.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)


def _write_models(folder: Path) -> None:
    """Models of `transformers` with random weights, under the names of real ones."""
    import torch  # noqa: PLC0415 - only some pages need these, which take seconds to import
    from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3Config  # noqa: PLC0415

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    for name, config in (
        ("llama-1b", LlamaConfig(**sizes)),
        ("qwen3-0.6b", Qwen3Config(**sizes, head_dim=16)),
        ("mixtral-8x7b", MixtralConfig(**sizes)),
    ):
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
