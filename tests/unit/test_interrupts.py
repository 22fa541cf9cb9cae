"""Reaction of the command to real signals and a real terminal."""

from __future__ import annotations

import os
import pty
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from pipelines.run import drive
from pipelines.run.drive import Interrupts

PRINTING = """
import sys, time
from pipelines.run.drive import Interrupts

interrupts = Interrupts()
print("ready", flush=True)
while not interrupts.number:
    time.sleep(0.01)
for _ in range(100):
    print("the terminal is gone", flush=True)
    print("the terminal is gone", file=sys.stderr, flush=True)
sys.exit(128 + interrupts.number)
"""


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    interrupts = Interrupts()
    yield interrupts
    interrupts.restore()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_that_arrives_twice_at_once_counts_as_one(
    interrupts: Interrupts, number: int
) -> None:
    """`timeout` signals the process and then its group."""
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)
    assert interrupts.number == number


def test_second_signal_later_ends_the_command_at_once(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive, "REPEAT_S", 0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.02)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


def test_command_under_nohup_ignores_the_hangup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        interrupts = Interrupts()
        os.kill(os.getpid(), signal.SIGHUP)
        assert interrupts.number == 0
        interrupts.restore()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_closed_terminal_is_a_request_to_stop() -> None:
    """Nothing that is printed afterwards raises."""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # pytest itself may run under `nohup`
        os.execv(sys.executable, [sys.executable, "-c", PRINTING])
    output = b""
    while b"ready" not in output:
        output += os.read(terminal, 1024)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 129
