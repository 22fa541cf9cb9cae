"""What a script counts and prints is that of an undisturbed run, at whatever moment workers die."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import counting_script
import loops
import pytest
from counting_script import AT_THE_TOP, BEHIND_BODY, BETWEEN_EPOCHS, IN_BODY
from harness import Outcome, run_in_processes

from elastic.geometry.layout import Layout
from pipelines.loop.script import script_of

NUM_STEPS = counting_script.EPOCHS * counting_script.SIZE
STEPS, EPOCHS = range(1, NUM_STEPS + 1), range(counting_script.EPOCHS)
MOMENTS = [
    *(f"{moment} {number}" for moment, number in product((IN_BODY, BEHIND_BODY), STEPS)),
    *(f"{moment} {number}" for moment, number in product((AT_THE_TOP, BETWEEN_EPOCHS), EPOCHS)),
]
FEW = [f"{IN_BODY} 1", f"{IN_BODY} 5", f"{BEHIND_BODY} 8", f"{BETWEEN_EPOCHS} 1", f"{AT_THE_TOP} 2"]


def run_counting(
    folder: Path, moment: str = "", is_first: bool = False
) -> tuple[Outcome, list[str]]:
    """A run, and the lines that its script has printed."""
    (marks := folder / "marks").mkdir(parents=True)
    environment = {loops.FOLDER: str(marks), counting_script.MOMENT: moment}
    environment[counting_script.IS_FIRST] = "1" if is_first else ""
    run = run_in_processes(
        folder,
        script_of(counting_script.main).settings,
        Layout.parse("dp=2").num_workers,
        layout="dp=2",
        recipe=f"{counting_script.__file__}:main",
        environment=environment,
    )
    assert run.stopped.outcome == "completed", run.stopped
    assert len(run.lines_of("WorkerLost")) == bool(moment)
    return run, (marks / counting_script.PRINTED).read_text().splitlines()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, list[str]]:
    return run_counting(tmp_path_factory.mktemp("undisturbed"))


def assert_same(undisturbed: tuple[Outcome, list[str]], folder: Path, moment: str) -> None:
    """Another worker than the first dies, then the first: that may lose a line that it was about to
    write, or leave one that the next first worker writes again."""
    run, lines = undisturbed
    assert len(lines) == 2 * NUM_STEPS + 2 * counting_script.EPOCHS + 1
    other, its_lines = run_counting(folder / "other", moment)
    assert other.losses() == pytest.approx(run.losses(), rel=1e-9)
    if moment.startswith(BEHIND_BODY):
        lines, its_lines = map(_without_accuracy, (lines, its_lines))
    assert its_lines == lines
    first, its_lines = run_counting(folder / "first", moment, is_first=True)
    assert first.losses() == pytest.approx(run.losses(), rel=1e-9)
    if moment.startswith(BEHIND_BODY):
        its_lines = _without_accuracy(its_lines)
    assert {*its_lines} <= {*lines}
    assert len({*lines} - {*its_lines}) <= 1 and len(its_lines) - len({*its_lines}) <= 1


def _without_accuracy(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith(counting_script.ACCURACY)]


@pytest.mark.slow
@pytest.mark.parametrize("moment", FEW)
def test_script_counts_and_prints_each_step_once(
    moment: str, undisturbed: tuple[Outcome, list[str]], tmp_path: Path
) -> None:
    assert_same(undisturbed, tmp_path, moment)


@pytest.mark.soak
@pytest.mark.parametrize("moment", [moment for moment in MOMENTS if moment not in FEW])
def test_script_counts_and_prints_each_step_once_at_any_moment(
    moment: str, undisturbed: tuple[Outcome, list[str]], tmp_path: Path
) -> None:
    assert_same(undisturbed, tmp_path, moment)
