"""Data without a length: each sample once and in order, through deaths and a reshard."""

from __future__ import annotations

from pathlib import Path

import pytest
import streaming_scripts
from test_script_habits import run_habit

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["texts", "texts_by_readers"])
def test_stream_is_trained_on_as_by_a_plain_loop(name: str, tmp_path: Path) -> None:
    run = run_habit(tmp_path, name, module=streaming_scripts)
    expected = list(streaming_scripts.plain_losses())
    assert list(run.losses().values()) == pytest.approx(expected, rel=1e-9)


def test_generator_function_is_called_again_where_it_ends(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "by_generator", module=streaming_scripts)
    expected = list(streaming_scripts.plain_by_generator())
    assert list(run.losses().values()) == pytest.approx(expected, rel=1e-9)
