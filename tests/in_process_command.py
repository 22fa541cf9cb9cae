"""`elastic` in the test's own process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from pipelines.cli import main

RunCommand = Callable[..., tuple[int, str, str]]
"""Runs a command with further arguments; returns its exit code, output and errors."""


def in_process(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> RunCommand:
    """A function that runs this command of `elastic`."""

    def run_command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["elastic", command, *arguments])
        with pytest.raises(SystemExit) as exited:
            main()
        out, err = capsys.readouterr()
        return int(exited.value.code or 0), out, err

    return run_command
