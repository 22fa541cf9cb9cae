"""Chat data: rendering with response masks, and packing into separate documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from pipelines.data.chats import find_rendering
from pipelines.data.packing import IGNORED, PackedChats, prepare_chats
from pipelines.errors import UserError

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long"},
]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_chats(folder: Path, *records: object) -> str:
    file = folder / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return str(file)


def test_plain_rendering_counts_responses_and_their_separator() -> None:
    rendering = find_rendering("bytes", None)
    tokens, counts = rendering.render(CONVERSATION, "here")
    text = "".join(chr(token) if token < 256 else "|" for token in tokens)
    assert text == "system: Be brief.\nuser: Hi\nassistant: Hello!|user: Bye\nassistant: So long|"
    counted = "".join(
        c if counts_in_loss else "." for c, counts_in_loss in zip(text, counts, strict=True)
    )
    assert counted.replace(".", "") == "Hello!|So long|"


def test_template_rendering_counts_the_text_of_responses(tmp_path: Path) -> None:
    vocabulary = {symbol: number for number, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    rendering = find_rendering(str(tmp_path / "tokenizer.json"), None)
    tokens, counts = rendering.render(CONVERSATION, "here")
    text = tokenizer.decode(tokens).replace("Ġ", " ").replace(" ", "")
    assert len(tokens) == len(counts)
    whole = "<system>Be brief.</s><user>Hi</s><assistant>Hello!</s><user>Bye</s>"
    assert len(tokens) == len(whole) + len("<assistant>So long</s>"), text
    assert sum(counts) == len("Hello!</s>") + len("So long</s>")


def test_packed_conversations_keep_their_targets_and_documents(tmp_path: Path) -> None:
    short = {"prompt": "a", "response": "bc"}
    source = write_chats(
        tmp_path, {"messages": CONVERSATION}, short, short, {"prompt": "x", "response": "y"}
    )
    folder = prepare_chats(source, str(tmp_path / "data"), 80, held_out_fraction=0.0)
    assert prepare_chats(source, str(tmp_path / "data"), 80, held_out_fraction=0.0) == folder
    samples = PackedChats(folder, "train")
    tokens, targets, documents = samples.read(range(samples.num_samples))
    assert (samples.num_samples, samples.seq_len, samples.vocab_size) == (2, 80, 257)
    counted = targets != IGNORED
    responses = bytes(min(token, 255) for token in targets[counted].tolist())
    assert sorted(responses.split(b"\xff")) == sorted(
        [b"", b"Hello!", b"So long", b"bc", b"bc", b"y"]
    )
    inside = documents[:, :-1] == documents[:, 1:]
    follows = tokens[:, 1:] == targets[:, :-1]
    assert torch.all(follows[inside & counted[:, :-1]])
    with pytest.raises(UserError, match="held_out split has no conversation"):
        PackedChats(folder, "held_out")


BAD = {
    "no JSON": ("{", "line 1: not JSON"),
    "no conversation": ('{"text": "a"}', "each line is"),
    "no response": (
        '{"messages": [{"role": "user", "content": "a"}]}',
        "no message of role assistant",
    ),
    "no text": ('{"prompt": 1, "response": "a"}', "each line is"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_line_is_refused_with_its_problem(tmp_path: Path, name: str) -> None:
    line, message = BAD[name]
    file = tmp_path / "chats.jsonl"
    file.write_text(line)
    with pytest.raises(UserError, match=message):
        prepare_chats(str(file), str(tmp_path / "data"), 80)
