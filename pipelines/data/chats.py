"""Chat data: conversations in JSONL, rendered to tokens with a mask of the responses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pipelines.data.source_files import SourceFile
from pipelines.data.tokens import Tokenizer, find_tokenizer
from pipelines.data.transformers_library import library
from pipelines.errors import UserError
from pipelines.settings.home import expand_home

Message = Mapping[str, str]
ASSISTANT = "assistant"
MESSAGES = '{"messages": [{"role": "user", "content": "..."}, ...]}'
PAIR = '{"prompt": "...", "response": "..."}'


class Conversation(NamedTuple):
    """Token ids, and for each whether it is part of a response and so counts in the loss."""

    tokens: list[int]
    is_response: list[bool]


class Rendering(Protocol):
    """A way to turn conversations into tokens; renderings of equal names give equal tokens."""

    name: str
    vocab_size: int

    def render(self, messages: Sequence[Message], where: str) -> Conversation:
        """The tokens of a conversation. Raises `UserError`, whose message begins with `where`."""


class PlainRendering:
    """Messages as `role: content`, each response followed by the separator, others by a newline."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.name = f"plain/{tokenizer.name}"
        self.vocab_size = tokenizer.vocab_size

    def render(self, messages: Sequence[Message], where: str) -> Conversation:
        conversation = Conversation([], [])
        for message in messages:
            is_response = message["role"] == ASSISTANT
            ending = "" if is_response else "\n"
            head, content = self.tokenizer.encode(
                [f"{message['role']}: ", message["content"] + ending]
            )
            tail = [self.tokenizer.separator] if is_response else []
            conversation.tokens.extend([*head.tolist(), *content.tolist(), *tail])
            conversation.is_response.extend([False] * len(head))
            conversation.is_response.extend([is_response] * (len(content) + len(tail)))
        return conversation


class TemplateRendering:
    """The chat template of a `transformers` tokenizer.

    A response is the text that the template writes for an assistant's message after the
    generation prompt.
    """

    def __init__(self, folder: Path, loaded: Any) -> None:
        self.loaded = loaded
        template = json.dumps(loaded.chat_template)
        self.name = f"{template}/{find_tokenizer(str(folder / 'tokenizer.json')).name}"
        self.vocab_size = len(loaded)

    def render(self, messages: Sequence[Message], where: str) -> Conversation:
        whole = self._text(messages, where)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                before = self._text(messages[:number], where, add_generation_prompt=True)
                after = self._text(messages[: number + 1], where)
                if not (whole.startswith(after) and after.startswith(before)):
                    raise UserError(
                        f"{where}: the tokenizer's chat template renders message {number + 1} "
                        "differently when others follow; give conversations of one response each"
                    )
                spans.append((len(before), len(after)))
        encoded = self.loaded(whole, add_special_tokens=False, return_offsets_mapping=True)
        is_response = [
            any(first <= begin < end for first, end in spans)
            for begin, _ in encoded["offset_mapping"]
        ]
        return Conversation(list(encoded["input_ids"]), is_response)

    def _text(self, messages: Sequence[Message], where: str, **options: bool) -> str:
        try:
            text = self.loaded.apply_chat_template(list(messages), tokenize=False, **options)
        except Exception as error:  # whatever a template raises
            raise UserError(
                f"{where}: the tokenizer's chat template refuses the conversation ({error})"
            ) from None
        assert isinstance(text, str)  # `tokenize=False` says so
        return text


def find_rendering(tokenizer: str, separator: str | None) -> Rendering:
    """The chat template in the folder of a `tokenizer.json`, if it has one, else plain text.

    Raises `UserError` for a tokenizer that cannot be read.
    """
    plain = PlainRendering(find_tokenizer(tokenizer, separator))
    folder = expand_home(tokenizer).parent
    if tokenizer == "bytes" or not (folder / "tokenizer_config.json").is_file():
        return plain
    try:
        loaded = library().AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: transformers cannot read its tokenizer ({error})") from None
    return TemplateRendering(folder, loaded) if loaded.chat_template else plain


def conversations_in(file: SourceFile) -> Iterator[tuple[list[Message], str]]:
    """The messages of each non-blank line, and the place of the line. Raises `UserError`."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error})") from None
    for number, line in enumerate(lines, start=1):
        if not line.isspace() and line:
            where = f"{file}, line {number}"
            yield _messages(line, where), where


def _messages(line: bytes, where: str) -> list[Message]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error}); fix or remove the line") from None
    record = record if isinstance(record, dict) else {}
    messages = record.get("messages")
    if messages is None and {"prompt", "response"} <= record.keys():
        messages = [
            {"role": "user", "content": record["prompt"]},
            {"role": ASSISTANT, "content": record["response"]},
        ]
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise UserError(f"{where}: not a conversation; each line is {MESSAGES} or {PAIR}")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise UserError(f"{where}: has no message of role {ASSISTANT}; add one or remove the line")
    return messages


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )
