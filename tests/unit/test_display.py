"""The live display in a terminal and in a log."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from written_runs import MIDNIGHT, WrittenRun

from elastic.protocol.events import Audited
from elastic.protocol.notes import LayoutAnswered, RolledBack, Waited, Warned
from pipelines.observe.history.run_folder import Tail
from pipelines.observe.view.display import Display, sparkline


def make_console(is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=100, color_system=None)


def read_output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def show_all(display: Display, run: WrittenRun) -> None:
    """Show all lines of the run, at the time of the last line."""
    journal, metrics = Tail(run.folder.journal), Tail(run.folder.metrics)
    display.update(run.now, journal.drain(), metrics.drain())


def write_eventful_run(path: Path) -> WrittenRun:
    run = WrittenRun(path)
    run.start(4, steps=100)
    for number in range(60):
        run.commit(loss=5 - number / 20)
    run.lose("w3", "connection reset")
    run.now += 0.21
    run.resume("w0", "w1", "w2")
    run.commit(loss=2.0)
    return run


def test_log_has_one_line_per_event_and_few_step_lines(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start(4, steps=1000)
    with Display(make_console(False), "run") as display:
        journal, metrics = Tail(run.folder.journal), Tail(run.folder.metrics)
        for _ in range(400):
            run.commit()
            display.update(run.now, journal.read(), metrics.read())
        run.stop()
        display.update(run.now, journal.read(), metrics.read())
        lines = read_output(display._console).splitlines()
    assert sum("loss" in line for line in lines) == 4
    assert any("generation 1: 4 workers (dp=4) from step 1" in line for line in lines)
    assert lines[-1].endswith("completed at step 400")
    assert len(lines) <= 9
    assert not any("\x1b" in line for line in lines)


def test_log_repeats_the_reason_of_a_wait_only_rarely(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    display = Display(make_console(False), "run")
    journal = Tail(run.folder.journal)
    for number in range(90):
        run.ready(f"w{number}")
        run.append_command(Waited(f"{number + 1} of 90 workers are ready"))
        run.now += 0.5
        display.update(run.now, journal.read())
    lines = read_output(display._console).splitlines()
    assert len(lines) == 5
    assert "waiting: 81 of 90 workers are ready" in lines[-1]


def test_long_cause_is_one_log_line(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start(2)
    run.lose("w1", "a very long cause\nwith a second line " + "x" * 150)
    display = Display(make_console(False), "run")
    show_all(display, run)
    loss_lines = [line for line in read_output(display._console).splitlines() if "w1 lost" in line]
    assert len(loss_lines) == 1
    assert "second line" in loss_lines[0]


def test_log_of_a_resumed_run_omits_earlier_events(tmp_path: Path) -> None:
    run = write_eventful_run(tmp_path / "run")
    run.stop("interrupted", "SIGTERM")
    run.now += 3600
    restarted = run.now
    run.start(4)
    display = Display(make_console(False), "run", since=restarted)
    show_all(display, run)
    assert "w3 lost" not in read_output(display._console)
    assert "step 61/1000" in read_output(display._console)


def test_panel_shows_step_loss_throughput_layout_and_last_events(tmp_path: Path) -> None:
    run = write_eventful_run(tmp_path / "run")
    display = Display(make_console(True), "my run")
    show_all(display, run)
    page = Console(width=100, file=io.StringIO(), color_system=None)
    page.print(display.panel(run.now + 3))
    text = read_output(page)
    for part in (
        "my run",
        "step 61 of 100",
        "2.0000",
        "9.66k tokens/s",
        "3 of 4 workers, dp=3, generation 2",
        "w3 lost: connection reset",
        "from step 61 after 0.21 s",
        "3 s ago",
        "training",
    ):
        assert part in text
    assert len(text.splitlines()) <= 16


def test_terminal_is_redrawn_at_most_four_times_per_second(tmp_path: Path) -> None:
    run = write_eventful_run(tmp_path / "run")
    with Display(make_console(True), "run") as display:
        show_all(display, run)
        drawn = read_output(display._console)
        display.update(run.now + 0.1)
        assert read_output(display._console) == drawn
        display.update(run.now + 0.3)
        assert len(read_output(display._console)) > len(drawn)


def test_layout_requests_are_logged(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start(4)
    run.append_command(LayoutAnswered(1, "a", "dp=2,fsdp=2", "dp=4"))
    run.append_command(LayoutAnswered(1, "b", "dp=4", "dp=4"))
    run.append_command(LayoutAnswered(1, "c", "", "dp=4", "it needs 9 workers"))
    display = Display(make_console(False), "run")
    show_all(display, run)
    messages = [line.partition("  ")[2] for line in read_output(display._console).splitlines()]
    assert [line for line in messages if line.startswith("layout")] == [
        "layout dp=2,fsdp=2 requested instead of dp=4",
        "layout refused: it needs 9 workers",
    ]


def test_terminal_is_restored_after_an_exception() -> None:
    console = make_console(True)
    with pytest.raises(RuntimeError), Display(console, "run") as display:
        display.update(MIDNIGHT)
        raise RuntimeError
    assert read_output(console).count("\x1b[?25l") == 1
    assert read_output(console).rstrip().endswith("\x1b[?25h")


def test_summary_is_one_line_with_steps_loss_time_and_goodput(tmp_path: Path) -> None:
    run = write_eventful_run(tmp_path / "run")
    run.stop()
    display = Display(make_console(False), "run")
    show_all(display, run)
    assert display.summary(run.now + 60) == (
        "completed · 61 steps · loss 2.0000 · 6.8 s · goodput 89.6% with start-up · 1 lost · "
        "0 joined · 0 steps redone"
    )


def test_sparkline_shows_the_course_of_values() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert sparkline([1.0] * 100, 10) == "▁" * 10
    assert sparkline([], 10) == ""
    assert len(sparkline([float(n) for n in range(1000)], 32)) == 32


def test_skipped_steps_rollbacks_and_audits_are_logged(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start(2)
    run.commit()
    run.append_command(
        Warned(1, 1, "skipped", "step 1 was skipped: a loss or gradient was not finite")
    )
    spiked = "the loss of step 9 spiked: 9 after a median of 2"
    run.append_command(RolledBack(2, 5, 10, "checkpoint", spiked, (5, 6, 7, 8)))
    for step in (5, 10):
        run.append_event(Audited(1, step, 1))
    run.append_command(
        Warned(1, 20, "audit", "w1 holds different bits than 2 replicas: it is replaced")
    )
    display = Display(make_console(False), "run")
    show_all(display, run)
    messages = [line[10:] for line in read_output(display._console).splitlines()]
    assert messages[-5:-1] == [
        "step 1 was skipped: a loss or gradient was not finite",
        f"rolled back from step 10 to 5: {spiked}; the data of 4 steps are skipped",
        "no audit under dp=2: no worker is a replica of another",
        "w1 holds different bits than 2 replicas: it is replaced",
    ]
    skipped = display.history.membership.run_events[-4]
    assert (skipped.kind, skipped.step) == ("skipped", 1)
