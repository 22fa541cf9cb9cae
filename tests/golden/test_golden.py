"""Whole protocols as text: each scenario file holds events and the answers of the core.

`REWRITE_GOLDEN=1 pytest tests/golden` writes the answers again; read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from script import Script

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_core_answers_as_the_scenario_says(path: Path) -> None:
    text = path.read_text()
    played = Script().play(text)
    if os.environ.get("REWRITE_GOLDEN"):
        path.write_text(played)
    else:
        assert played == text


def test_changed_answer_fails_the_comparison() -> None:
    text = SCENARIOS[0].read_text()
    changed = text.replace("StartStore", "StartShop")
    assert changed != text
    assert Script().play(changed) == text
