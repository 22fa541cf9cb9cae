"""The converted examples change as few lines as the documentation says."""

from __future__ import annotations

import re

from example_pairs import EXAMPLES, MAX_CHANGED_LINES, count_lines

PAGE = EXAMPLES.parent / "docs" / "imperative.md"
ROW = re.compile(r"\| \[(\w+)_before\.py\].* \| (\d+) \|")


def test_documented_numbers_of_lines_are_those_of_the_examples() -> None:
    documented = {name: int(number) for name, number in ROW.findall(PAGE.read_text())}
    names = {file.name.removesuffix("_before.py") for file in EXAMPLES.glob("*_before.py")}
    assert documented == {name: count_lines(name)[0] for name in names}
    assert max(documented.values()) <= MAX_CHANGED_LINES
