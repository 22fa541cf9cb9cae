"""The screen of a terminal, as far as `rich` uses it: text, colours, cursor up, erased lines."""

from __future__ import annotations

import re

SEQUENCE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b[()][A-Z0-9]|\x1b[=>]|\x1b\][^\x07]*\x07")
UNFINISHED = re.compile(r"\x1b(?:\[[?\d;]*|[()]|\][^\x07]*)?$")

Run = tuple[str, str]
"""Text, and its style: the parameters of the SGR sequence, such as `1;32` for bold green."""
Cell = tuple[str, str]


class Screen:
    """Takes the output of a program piece by piece; `rows()` is what the terminal shows."""

    def __init__(self, num_columns: int, num_rows: int) -> None:
        self._num_columns, self._num_rows = num_columns, num_rows
        self._lines: list[list[Cell]] = [[]]
        self._row = self._column = 0
        self._style = ""
        self._rest = ""

    def write(self, output: str) -> None:
        output = self._rest + output
        unfinished = UNFINISHED.search(output)
        end = unfinished.start() if unfinished else len(output)
        output, self._rest = output[:end], output[end:]
        begin = 0
        for sequence in SEQUENCE.finditer(output):
            self._print(output[begin : sequence.start()])
            self._control(sequence[1] or "", sequence[2] or "")
            begin = sequence.end()
        self._print(output[begin:])

    def rows(self) -> list[list[Run]]:
        """The rows from the top, each as runs of text of one style."""
        rows = [_runs(line) for line in self._lines]
        while rows and not rows[-1]:
            rows.pop()
        shown = rows[-self._num_rows :]
        return shown + [[]] * (self._num_rows - len(shown))

    def _print(self, text: str) -> None:
        for character in text:
            if character == "\n":
                self._row += 1
                if self._row == len(self._lines):
                    self._lines.append([])
            elif character == "\r":
                self._column = 0
            elif character >= " ":
                line = self._lines[self._row]
                line += [(" ", "")] * (self._column + 1 - len(line))
                line[self._column] = (character, self._style)
                self._column = min(self._column + 1, self._num_columns - 1)

    def _control(self, parameters: str, kind: str) -> None:
        number = int(parameters) if parameters.isdigit() else 0
        if kind == "A":
            self._row = max(0, self._row - (number or 1))
        elif kind == "B":
            self._row = min(len(self._lines) - 1, self._row + (number or 1))
        elif kind == "G":
            self._column = max(0, (number or 1) - 1)
        elif kind == "K":
            line = self._lines[self._row]
            self._lines[self._row] = [] if number == 2 else line[: self._column]
        elif kind == "J":
            del self._lines[self._row + 1 :]
            del self._lines[self._row][self._column :]
        elif kind == "m":
            self._style = _style(self._style, parameters)


def _style(before: str, parameters: str) -> str:
    """The style after an SGR sequence: at most one attribute and one colour."""
    attribute, colour = _parts(before)
    for word in (parameters or "0").split(";"):
        number = int(word or 0)
        if number == 0:
            attribute = colour = ""
        elif number in (1, 2, 3):
            attribute = str(number)
        elif number in (22, 23):
            attribute = ""
        elif 30 <= number <= 37 or 90 <= number <= 97:
            colour = str(number)
        elif number == 39:
            colour = ""
    return ";".join(filter(None, (attribute, colour)))


def _parts(style: str) -> tuple[str, str]:
    words = style.split(";") if style else []
    colours = [word for word in words if len(word) == 2]
    return "".join(word for word in words if len(word) == 1), "".join(colours)


def _runs(line: list[Cell]) -> list[Run]:
    runs: list[Run] = []
    for character, style in line:
        if runs and (runs[-1][1] == style or character == " "):
            runs[-1] = (runs[-1][0] + character, runs[-1][1])
        else:
            runs.append((character, style))
    while runs and not runs[-1][0].strip():
        runs.pop()
    return [*runs[:-1], (runs[-1][0].rstrip(), runs[-1][1])] if runs else []
