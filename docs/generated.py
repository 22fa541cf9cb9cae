"""Generated parts of pages: written between two marks, or compared with them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def keep(document: Path, parts: Mapping[str, str]) -> None:
    """Write each part between the marks of its name.

    With `--check` on the command line nothing is written: exits with 1 if anything would change.
    """
    before = document.read_text()
    after = before
    for name, text in parts.items():
        after = _between_marks(document, after, name, text)
    if "--check" not in sys.argv[1:]:
        document.write_text(after)
    elif after != before:
        script = Path(sys.argv[0]).name
        sys.exit(f"{document.relative_to(ROOT)} is out of date: run `python docs/{script}`")


def _between_marks(document: Path, whole: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name}: generated -->", f"<!-- {name}: end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(whole)) != 1:
        sys.exit(f"{document}: has no part '{name}' between {begin} and {end}")
    return pattern.sub(lambda _: f"{begin}\n\n{text}\n\n{end}", whole)
