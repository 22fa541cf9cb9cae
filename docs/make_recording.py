"""The moving picture of the README, `recording.svg`: a recorded run of the command that it shows.

    python docs/make_recording.py             # draws recording.svg from recording.jsonl
    python docs/make_recording.py --check     # exits with 1 if that would change it
    python docs/make_recording.py --record    # runs the command in a terminal, then draws

`recording.jsonl` has one JSON object a line. The first has the command and the size of the screen.
Each other is a screen: `at` (seconds), and the changed `rows` by number, as runs of text and style.
"""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from terminal_screen import Run, Screen

ROOT = Path(__file__).parents[1]
CAPTURE = ROOT / "docs" / "recording.jsonl"
PICTURE = ROOT / "docs" / "recording.svg"

COMMAND = 'elastic train byte_lm --workers 4 --run-name demo --inject "kill worker 3 at step 60"'
NUM_COLUMNS, NUM_ROWS = 92, 15
LOST, READY, JOINED = "w3 lost", "w4 is ready", "generation 3"
"""What the screen shows when the worker is lost; when its replacement is ready, and has joined."""
LEAD_S, TAIL_S, LIMIT_S = 5.0, 5.0, 600.0
"""Recorded before the loss and after the replacement joined; and the most that is waited for it."""
SAMPLE_S = 0.45
"""The least time between two screens: the panel is drawn four times a second."""

FAST = 5.0
"""While the replacement warms up, the picture runs this many times as fast."""
SLOW_AFTER_S, SLOW_BEFORE_S, HOLD_S = 3.0, 1.0, 4.0
"""At the speed of the run: after the loss, before the replacement is there; and the last screen."""

CELL, LINE, MARGIN, BAR = 8, 18, 14, 30
"""Pixels: the width of a character, the height of a row, around the text, the bar at the top."""
COLOURS = {
    "": "#d8dee9", "31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "34": "#79c0ff",
    "35": "#d2a8ff", "36": "#76e3ea", "37": "#f0f6fc", "90": "#6e7681", "91": "#ff7b72",
    "92": "#7ee787", "93": "#e3b341", "94": "#79c0ff", "95": "#d2a8ff", "96": "#76e3ea",
    "97": "#ffffff",
}  # fmt: skip
ATTRIBUTES = {"1": "font-weight:bold", "2": "opacity:.65", "3": "font-style:italic"}

PIECE = re.compile(r"\S+(?: \S+)*")

T = TypeVar("T")
Rows = list[list[Run]]
Piece = tuple[int, int, str, str]
"""Row, column, text and style."""


@dataclass(frozen=True)
class Capture:
    """Screens with their times in seconds from the first one."""

    command: str
    num_columns: int
    screens: list[tuple[float, Rows]]

    def first(self, text: str) -> float:
        """When the screen first has the text; the end if it never has."""
        return next((at for at, rows in self.screens if text in plain(rows)), self.screens[-1][0])


def plain(rows: Rows) -> str:
    return "\n".join("".join(text for text, _ in row) for row in rows)


def read_capture(path: Path) -> Capture:
    head, *lines = (json.loads(line) for line in path.read_text().splitlines())
    rows: Rows = [[] for _ in range(head["rows"])]
    screens = []
    for line in lines:
        rows = list(rows)
        for number, runs in line["rows"].items():
            rows[int(number)] = [(text, style) for text, style in runs]
        screens.append((line["at"], rows))
    return Capture(head["command"], head["columns"], screens)


def write_capture(path: Path, capture: Capture) -> None:
    num_rows = len(capture.screens[0][1])
    head = {"command": capture.command, "columns": capture.num_columns, "rows": num_rows}
    lines, before = [json.dumps(head)], [[]] * num_rows
    for at, rows in capture.screens:
        changed = {n: row for n, row in enumerate(rows) if row != before[n]}
        lines.append(json.dumps({"at": round(at, 2), "rows": changed}, ensure_ascii=False))
        before = rows
    path.write_text("\n".join(lines) + "\n")


def record(words: Sequence[str | Path], tail_s: float = TAIL_S) -> Capture:
    """Run a program in a pseudo-terminal until the replacement has joined, then interrupt it.

    Raises `RuntimeError` with the last screen if the program ends before.
    """
    with TemporaryDirectory() as folder:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, NUM_COLUMNS, 0, 0))
        process = subprocess.Popen(
            words,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            env={**os.environ, "TERM": "xterm-16color", "COLUMNS": str(NUM_COLUMNS)},
            start_new_session=True,
        )
        os.close(slave)
        try:
            screens = list(_screens(master, tail_s))
            process.send_signal(signal.SIGINT)
            for _ in _chunks(master, time.monotonic() + LIMIT_S):
                pass  # an unread terminal would block the program
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            os.close(master)
    lost = [at for at, rows in screens if LOST in plain(rows)]
    if not lost or JOINED not in plain(screens[-1][1]):
        raise RuntimeError(f"ended too early:\n{plain(screens[-1][1]) if screens else ''}")
    begin = lost[0] - LEAD_S
    recorded = [(at - begin, rows) for at, rows in screens if at >= begin]
    return Capture(COMMAND, NUM_COLUMNS, recorded)


def _chunks(master: int, deadline: float) -> Iterator[bytes]:
    """What the program prints, until it ends or the deadline has passed."""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([master], [], [], left)[0]:
            return
        try:
            chunk = os.read(master, 65536)
        except OSError:  # Linux reports the end of the program as an error of the terminal
            return
        if not chunk:
            return
        yield chunk


def _screens(master: int, tail_s: float) -> Iterator[tuple[float, Rows]]:
    """The screen after each output, not too often, until `tail_s` after the replacement joined."""
    screen, decoder = Screen(NUM_COLUMNS, NUM_ROWS), codecs.getincrementaldecoder("utf-8")()
    began, taken, joined = time.monotonic(), -SAMPLE_S, float("inf")
    for chunk in _chunks(master, began + LIMIT_S):
        screen.write(decoder.decode(chunk))
        at, rows = time.monotonic() - began, screen.rows()
        if at - taken >= SAMPLE_S:
            taken = at
            yield at, rows
        if JOINED in plain(rows):
            joined = min(joined, at)
        if at > joined + tail_s:
            return


def playback(capture: Capture) -> list[tuple[float, bool, Rows]]:
    """The screens with their times in the picture, and whether it runs fast there."""
    slow_until = capture.first(LOST) + SLOW_AFTER_S
    fast_until = capture.first(READY) - SLOW_BEFORE_S
    shown: list[tuple[float, bool, Rows]] = []
    for at, rows in capture.screens:
        is_fast = slow_until < at < fast_until
        saved = (min(at, fast_until) - slow_until) * (1 - 1 / FAST) if at > slow_until else 0.0
        when = at - max(0.0, saved)
        if not shown or when - shown[-1][0] >= SAMPLE_S * 0.9:
            shown.append((when, is_fast, rows))
    return shown


def render(capture: Capture) -> str:
    """The picture: SVG with CSS animation, without scripts and without files from elsewhere."""
    shown = playback(capture)
    begin, duration = shown[0][0], shown[-1][0] - shown[0][0] + HOLD_S
    times = [100 * (when - begin) / duration for when, _, _ in shown] + [100.0]
    width = capture.num_columns * CELL + 2 * MARGIN
    num_rows = max(n + 1 for _, _, rows in shown for n, row in enumerate(rows) if row)
    height = BAR + num_rows * LINE + MARGIN
    texts: dict[tuple[int, int], list[str]] = {}
    for piece, spans in visible_spans([pieces(rows) for _, _, rows in shown]).items():
        for span in spans:
            texts.setdefault(span, []).append(_text(*piece))
    label = f'<text class="s" x="{width - MARGIN}" y="20">{FAST:.0f} x speed</text>'
    for span in visible_spans([{is_fast} for _, is_fast, _ in shown]).get(True, ()):
        texts.setdefault(span, []).append(label)
    always = (0, len(shown))
    spans = sorted(texts.keys() - {always})
    command = escape(capture.command, quote=False)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" role="img">',
            f"<title>Recording of {command}</title>",
            _style_sheet(capture, spans, times, duration),
            f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            f'<text x="{MARGIN}" y="20"><tspan class="c32">$</tspan> {command}</text>',
            *texts.get(always, ()),
            *(
                f'<g class="{"v z" if span[1] == len(shown) else "v"}" id="{_name(span)}">'
                f"{''.join(texts[span])}</g>"
                for span in spans
            ),
            "</svg>\n",
        ]
    )


def pieces(rows: Rows) -> set[Piece]:
    """The texts of a screen between gaps: what stays over several screens is drawn once."""
    found = set()
    for number, row in enumerate(rows):
        column = 0
        for text, style in row:
            for piece in PIECE.finditer(text):
                found.add((number, column + piece.start(), piece[0], style))
            column += len(text)
    return found


def visible_spans(screens: Sequence[Set[T]]) -> dict[T, list[tuple[int, int]]]:
    """For each thing on any screen: the first screen that has it, and the next that does not."""
    spans: dict[T, list[tuple[int, int]]] = {}
    before: Set[T] = set()
    for index, screen in enumerate(screens):
        for thing in sorted(screen):
            if thing in before:
                spans[thing][-1] = (spans[thing][-1][0], index + 1)
            else:
                spans.setdefault(thing, []).append((index, index + 1))
        before = screen
    return spans


def _text(row: int, column: int, text: str, style: str) -> str:
    x, y = MARGIN + CELL * column, BAR + (row + 1) * LINE - 5
    kind = f' class="{_class(style)}"' if style else ""
    fitted = f' textLength="{CELL * len(text)}"' if len(text) > 1 else ""
    return f'<text x="{x}" y="{y}"{kind}{fitted}>{escape(text, quote=False)}</text>'


def _class(style: str) -> str:
    return " ".join(f"{'c' if len(word) == 2 else 'a'}{word}" for word in style.split(";"))


def _name(span: tuple[int, int]) -> str:
    return f"k{span[0]}-{span[1]}"


def _style_sheet(
    capture: Capture, spans: list[tuple[int, int]], times: list[float], duration: float
) -> str:
    frames = []
    for first, last in spans:
        steps = [(0.0, "hidden")] if first else []
        steps += [(times[first], "visible")]
        steps += [(times[last], "hidden")] if times[last] < 100 else []
        keys = "".join(f"{at:.2f}%{{visibility:{value}}}" for at, value in steps)
        name = _name((first, last))
        frames.append(f"@keyframes {name}{{{keys}}}#{name}{{animation-name:{name}}}")
    styles = {
        word
        for _, rows in capture.screens
        for row in rows
        for _, style in row
        for word in style.split(";")
        if word
    } | {"32"}
    rules = [
        f".{_class(word)}{{{ATTRIBUTES.get(word) or f'fill:{COLOURS[word]}'}}}"
        for word in sorted(styles)
    ]
    return "\n".join(
        [
            "<style>",
            'text{font:13px ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;'
            f"fill:{COLOURS['']};white-space:pre}}",
            "rect{fill:#0d1117;stroke:#6e7681}",
            ".s{fill:#e3b341;text-anchor:end}",
            f".v{{visibility:hidden;animation:{duration:.2f}s step-end infinite}}",
            *rules,
            *frames,
            "@media (prefers-reduced-motion:reduce){.v{animation:none}.z{visibility:visible}}",
            "</style>",
        ]
    )


def main() -> None:
    if "--record" in sys.argv[1:]:
        elastic = Path(sys.executable).with_name("elastic")
        write_capture(CAPTURE, record([elastic, *shlex.split(COMMAND)[1:]]))
    picture = render(read_capture(CAPTURE))
    if "--check" not in sys.argv[1:]:
        PICTURE.write_text(picture)
    elif not PICTURE.exists() or PICTURE.read_text() != picture:
        sys.exit("docs/recording.svg is out of date: run `python docs/make_recording.py`")


if __name__ == "__main__":
    main()
