"""Finds words in code and documents that the glossary replaces; `make lint` runs it.

.venv/bin/python tools/words.py            prints each line with such a word; exits with 1 if any
.venv/bin/python tools/words.py --count    prints the number of hits for each folder
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUFFIXES = {".py", ".md", ".txt", ".toml", ".yaml", ".yml", ".html", ".svg", ""}
EXEMPT = {"CHANGELOG.md", "tools/words.py"}
"""The changelog names what was renamed."""

INSTEAD = {
    r"re-?lay(out|outs|ing|ed)?|re-?laid|re-lay\w*": "reshard",
    r"lay(s|ing)? out anew": "reshard",
    r"keepers?": "snapshot server",
    r"wish(es|ed|ing)?": "target layout, or a request",
    r"settl(e|es|ed|ing)": "roll forward",
    r"rewinds?|rewinding|rewound": "rollback",
    r"leavers?": "draining worker",
    r"spares": "standby workers",
    r"avoided": "quarantined",
    r"(give|giving|gives) way": "gang back-off",
    r"own[ _]times?": "compute time",
    r"look(ing|s)?[ _-]ahead": "prefetch",
    r"litter": "stale checkpoints",
    r"left[ _]out": "skipped",
    r"maths": "training settings",
    r"seat(s|ed|ing)?": "placement",
    r"happenings?": "event",
    r"stand[_-]?ins?": "substitute",
    r"standstill": "stall",
    r"mend(s|ed|ing)?": "fix",
    r"amiss|in one's way": "problem",
    r"tell(?!\()|tells|telling|told": "report",
    r"one's": "your, or custom",
    r"whoever|whosoever": "name the actor",
    r"nobody|somebody|anybody|everybody": "name the actor: no worker, another process",
    r"he(?! et al)|him|his": "it",
    r"amid": "during",
    r"anew|afresh": "again",
    r"shelf|shelves": "snapshot set",
    r"doors?": "authenticated server, or package",
}
"""Patterns, and the words to use instead."""

_WORDS = re.compile(
    "|".join(f"(?<![a-zA-Z])(?:{pattern})(?![a-zA-Z])" for pattern in INSTEAD), re.IGNORECASE
)


_SEED = re.compile(r"Random\(f\"[^\"]*\"\)")
"""The name of a seed; another name would be another seed."""


def files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = [name for name in listed.stdout.splitlines() if name not in EXEMPT]
    return [
        ROOT / name for name in names if Path(name).suffix in SUFFIXES and (ROOT / name).exists()
    ]


def hits(file: Path) -> Iterator[tuple[int, str]]:
    """The number of each line with such a word, and the word."""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        for match in _WORDS.finditer(_SEED.sub("", line)):
            yield number, match[0]


def instead_of(word: str) -> str:
    return next(
        use for pattern, use in INSTEAD.items() if re.fullmatch(pattern, word, re.IGNORECASE)
    )


def main() -> int:
    found = [(file.relative_to(ROOT), *hit) for file in files() for hit in hits(file)]
    if "--count" in sys.argv[1:]:
        folders = Counter("/".join(file.parts[:2][: len(file.parts) - 1]) for file, _, _ in found)
        for folder, number in sorted(folders.items()):
            print(f"{number:6} {folder or '.'}")
        print(f"{len(found):6} in all")
    else:
        for file, number, word in found:
            print(f"{file}:{number}: {word}: use {instead_of(word)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
