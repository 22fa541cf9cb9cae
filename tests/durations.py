"""Writes the table of the slowest tests in CONTRIBUTING.md from the JUnit file of `make ci`.

.venv/bin/python tests/durations.py build/tests/ci.xml
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from datetime import datetime
from os import cpu_count
from pathlib import Path
from xml.etree import ElementTree

NUM_FILES = 15
PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
BEGIN, END = "<!-- durations: begin -->\n", "<!-- durations: end -->\n"


def read_junit(file: Path) -> tuple[str, float, Counter[str], Counter[str]]:
    """The date, the wall time in seconds, and the seconds and number of tests of each file."""
    [suite] = ElementTree.parse(file).getroot().iter("testsuite")
    seconds: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for case in suite.iter("testcase"):
        words = case.get("classname", "").split(".")
        path = "/".join(words[: next(i for i, w in enumerate(words) if w.startswith("test_")) + 1])
        seconds[path] += float(case.get("time", "0"))
        number[path] += 1
    date = datetime.fromisoformat(suite.get("timestamp", "")).date()
    return str(date), float(suite.get("time", "0")), seconds, number


def make_table(file: Path) -> str:
    """Folders first, then the slowest files; the seconds of tests that overlap are added."""
    date, wall_s, seconds, number = read_junit(file)
    folders: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for path, took_s in seconds.items():
        folder = path.rpartition("/")[0]
        folders[folder] += took_s
        tests[folder] += number[path]
    lines = [
        f"{date}, {cpu_count()} cores: {sum(number.values())} tests in {wall_s / 60:.1f} minutes.",
        "",
        "| folder or file | tests | seconds |",
        "|---|---|---|",
    ]
    lines += [f"| `{f}` | {tests[f]} | {s:.0f} |" for f, s in folders.most_common()]
    slowest = seconds.most_common(NUM_FILES)
    lines += [f"| `{path}.py` | {number[path]} | {s:.0f} |" for path, s in slowest]
    return "\n".join(lines) + "\n"


def main() -> int:
    text = PAGE.read_text()
    marked_part = re.compile(re.escape(BEGIN) + ".*" + re.escape(END), re.DOTALL)
    if len(sys.argv) != 2 or not marked_part.search(text):
        print(
            f"usage: durations.py JUNIT_FILE; {PAGE.name} needs the lines {BEGIN.strip()} and end"
        )
        return 2
    new_table = make_table(Path(sys.argv[1]))
    PAGE.write_text(marked_part.sub(lambda _: BEGIN + new_table + END, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
