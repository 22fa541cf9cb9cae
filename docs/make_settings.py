"""Generator of the tables in `docs/settings.md`: every setting with its default and description.

python docs/make_settings.py            writes the page
python docs/make_settings.py --check    exits with 1 if the page is out of date
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from inspect import getdoc
from itertools import groupby

from generated import ROOT, keep

from pipelines.settings import Settings, TrainSettings
from pipelines.settings.setting import SettingEntry, entries_of

PAGE = ROOT / "docs" / "settings.md"
HEAD = ["| setting | default | may change | description |", "|---|---|---|---|"]


def sections() -> str:
    """One section for each group, in the order of the model."""
    grouped = groupby(entries_of(TrainSettings), key=lambda entry: (_prefix(entry), entry.group))
    parts = [
        "\n\n".join([f"## {_title(prefix, group)}", _intro(group), _table(list(entries))])
        for (prefix, group), entries in grouped
    ]
    return "\n\n".join(parts)


def _prefix(entry: SettingEntry) -> str:
    return entry.name.rpartition(".")[0]


def _title(prefix: str, group: type[Settings]) -> str:
    """`checkpoint`; for one of several kinds of model also its kind."""
    kind = group.model_fields.get("kind")
    return f"{prefix}: {kind.default}" if kind else prefix or "The run"


def _intro(group: type[Settings]) -> str:
    paragraphs = (getdoc(group) or "").split("\n\n")
    return "\n\n".join(_linked(paragraph) for paragraph in paragraphs)


def _table(entries: Sequence[SettingEntry]) -> str:
    return "\n".join([*HEAD, *_rows(entries)])


def _rows(entries: Sequence[SettingEntry]) -> Iterator[str]:
    for entry in entries:
        change = "yes" if entry.is_resumable else "no"
        description = _linked(entry.field.description or "")
        yield f"| `{entry.name}` | {_value(entry.field.default)} | {change} | {description} |"


def _value(value: object) -> str:
    """A value as `--set` accepts it."""
    text = str(value)
    if isinstance(value, tuple):
        text = ",".join(map(str, value))
    elif isinstance(value, float):
        text = f"{value:g}"
    elif value is None or isinstance(value, bool):
        text = text.lower()
    return f"`{text}`" if text not in ("", "{}") else "empty"


def _linked(text: str) -> str:
    """In one line, with links to the pages that the text names."""
    line = " ".join(text.split()).replace("|", "\\|")
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", line)


if __name__ == "__main__":
    keep(PAGE, {"settings": sections()})
