"""The moving picture of the README is drawn from a recorded run, and needs no player."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from users_policy import users_policy

from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Resume
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import RunOpened, WorkerLost, WorkerReady
from elastic.protocol.wire import command_line, event_line
from pipelines.observe.view.display import Display

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))

from make_recording import (  # noqa: E402
    BAR,
    CAPTURE,
    CELL,
    COMMAND,
    FAST,
    JOINED,
    LINE,
    LOST,
    MARGIN,
    NUM_COLUMNS,
    NUM_ROWS,
    PICTURE,
    READY,
    Capture,
    pieces,
    plain,
    playback,
    read_capture,
    record,
    render,
    visible_spans,
    write_capture,
)
from terminal_screen import Screen  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"


def lines_of_a_run() -> dict[int, list[dict]]:
    """The journal of a run by second: w3 is lost at 10 s, w4 is ready at 25 s and joins."""
    state, job = ControllerState(), Job(steps=100)
    four, three = ("w0", "w1", "w2", "w3"), ("w0", "w1", "w2")
    events = {
        0: [RunOpened(1, users_policy(max_workers=4), TargetLayout(), job)],
        1: [WorkerReady(worker, "node", pid=1) for worker in four],
        10: [WorkerLost("w3", "its process died")],
        25: [WorkerReady("w4", "node", pid=2)],
    }
    resumes = {
        2: Resume(1, 0, "dp=4", four, (), 0),
        11: Resume(2, 9, "dp=3", three, (), 0),
        26: Resume(3, 20, "dp=4", (*three, "w4"), (), 0),
    }
    lines = {at: [event_line(at, event, state) for event in kinds] for at, kinds in events.items()}
    for at, resume in resumes.items():
        lines[at] = [command_line(at, resume, state)]
    return lines


def drawn_run() -> Capture:
    """What a terminal shows of that run, drawn twice a second by the real display."""
    screen = Screen(NUM_COLUMNS, NUM_ROWS)
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, width=NUM_COLUMNS, color_system="standard", height=40
    )
    lines, screens = lines_of_a_run(), []
    with Display(console, "demo") as display:
        for half_s in range(2 * 32):
            now = half_s / 2
            journal = lines.get(int(now), []) if half_s % 2 == 0 else []
            display.update(now, journal)
            screen.write(file.getvalue().replace("\n", "\r\n"))  # as the kernel does for a terminal
            file.seek(0)
            file.truncate()
            screens.append((now, screen.rows()))
    return Capture(COMMAND, NUM_COLUMNS, screens)


@pytest.fixture(scope="module")
def capture() -> Capture:
    return drawn_run()


def test_the_screen_has_what_the_display_has_drawn_last(capture: Capture) -> None:
    last = plain(capture.screens[-1][1])
    assert last.count("╭") == last.count("╰") == 1, "the panel is redrawn in its place"
    assert all(len(line) == NUM_COLUMNS for line in last.splitlines() if line)
    assert "generation 3: 4 workers (dp=4)" in last and LOST in last
    assert LOST not in plain(capture.screens[0][1])


def test_the_screen_takes_output_in_any_pieces() -> None:
    output = "one\r\n\x1b[1;32mtwo\x1b[0m\r\x1b[2K\x1b[1A\x1b[2Kthree\r\n\x1b[36mfour\x1b[0m five"
    whole, pieces = Screen(20, 3), Screen(20, 3)
    whole.write(output)
    for character in output:
        pieces.write(character)
    assert whole.rows() == pieces.rows() == [[("three", "")], [("four ", "36"), ("five", "")], []]


PROGRAM = """
import time
for text in ("begun", "w3 lost", "w4 is ready", "generation 3", "one more", "the last"):
    print(text, flush=True)
    time.sleep(0.5)
time.sleep(60)
"""


def test_a_program_in_a_terminal_is_recorded_and_interrupted() -> None:
    capture = record([sys.executable, "-c", PROGRAM], tail_s=0.4)
    assert plain(capture.screens[0][1]).split() == ["begun"]
    assert "generation 3" in plain(capture.screens[-1][1])
    assert 0.3 < capture.first(JOINED) - capture.first(LOST) < 30


def test_a_program_that_ends_too_early_is_refused() -> None:
    with pytest.raises(RuntimeError, match="ended too early:\nonly this"):
        record([sys.executable, "-c", "print('only this')"])


def test_the_capture_is_read_as_it_was_written(capture: Capture, tmp_path: Path) -> None:
    write_capture(tmp_path / "a.jsonl", capture)
    read = read_capture(tmp_path / "a.jsonl")
    assert [rows for _, rows in read.screens] == [rows for _, rows in capture.screens]
    assert read.command == COMMAND


def test_only_the_wait_for_the_replacement_is_shortened(capture: Capture) -> None:
    shown = playback(capture)
    times = [at for at, _, _ in shown]
    assert times == sorted(times)
    saved = (24 - 13) * (1 - 1 / FAST)  # three seconds after the loss, one before w4 is ready
    assert times[-1] == pytest.approx(31.5 - saved, abs=0.5)
    fast = [plain(rows) for _, is_fast, rows in shown if is_fast]
    assert fast and all(LOST in text and "w4 joined" not in text for text in fast)


def test_the_picture_needs_no_script_and_no_other_file(capture: Capture) -> None:
    picture = render(capture)
    root = ElementTree.fromstring(picture)
    kinds = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert kinds == {"svg", "title", "style", "rect", "text", "tspan", "g"}
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import", picture)


def test_each_screen_is_in_the_picture(capture: Capture) -> None:
    """At the time of each screen exactly its texts are visible, by the keyframes."""
    root = ElementTree.fromstring(render(capture))
    sheet = root.find(f"{SVG}style").text
    frames = dict(re.findall(r"@keyframes ([\w-]+)\{(.+?\})\}#", sheet))
    [duration] = re.findall(r"animation:([\d.]+)s", sheet)
    groups = [(frames[group.get("id")], group) for group in root.findall(f"{SVG}g")]
    always = root.findall(f"{SVG}text")[1:]  # the first has the command
    shown = playback(capture)
    assert len(shown) > 20
    for at, _, rows in shown:
        percent = 100 * (at - shown[0][0]) / float(duration) + 0.02
        texts = [text for keys, group in groups if is_visible(keys, percent) for text in group]
        seen = {
            (position(text), text.text) for text in [*always, *texts] if text.get("class") != "s"
        }
        assert seen == {((row, column), text) for row, column, text, _ in pieces(rows)}


def position(text: ElementTree.Element) -> tuple[int, int]:
    """Row and column on the screen."""
    return (int(text.get("y")) + 5 - BAR) // LINE - 1, (int(text.get("x")) - MARGIN) // CELL


def is_visible(keys: str, percent: float) -> bool:
    values = re.findall(r"([\d.]+)%\{visibility:(\w+)\}", keys)
    return [value for at, value in values if float(at) <= percent][-1] == "visible"


def test_what_stays_is_drawn_once() -> None:
    assert visible_spans([{"a"}, {"a", "b"}, {"b"}, {"a"}]) == {
        "a": [(0, 2), (3, 4)],
        "b": [(1, 3)],
    }


def test_the_picture_of_the_readme_is_drawn_from_the_recorded_run() -> None:
    recorded = read_capture(CAPTURE)
    assert PICTURE.read_text() == render(recorded), "run `python docs/make_recording.py`"
    assert len(PICTURE.read_bytes()) < 60_000
    assert recorded.first(LOST) < recorded.first(READY) <= recorded.first(JOINED)
    assert JOINED in plain(recorded.screens[-1][1])


def test_the_readme_shows_the_picture_and_its_command() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "(docs/recording.svg)" in "\n".join(readme.splitlines()[:15])
    assert f".venv/bin/{COMMAND}\n" in readme
