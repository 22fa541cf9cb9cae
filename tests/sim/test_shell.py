"""The parts of the simulated controller notice what its shell must not do."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from memory_storage import MemoryStorage
from sim.controller_restarts import run_controllers
from sim.faults import Fault
from sim.logs import LAG_S, SimLease, SimLines, SimLog, WriterHooks, key_of
from sim.scenario import Scenario
from sim.shell import CheckFailed
from sim.shell_faults import drawn_with_shell_faults
from sim.simulation import simulate
from sim.worker import SimWorker
from sim.world import World

from actors.storage.errors import LeaseLost
from actors.storage.file_names import JOURNAL
from actors.storage.line_logs import LineLog
from elastic.protocol.commands import StartWorkers, StopWorker
from elastic.protocol.controller_events import ControllerRaised
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import RunOpened
from elastic.protocol.wire import command_line

STOP = StopWorker("w1", "silent")


class Log:
    """A journal of which the test moves the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.storage = MemoryStorage()
        self.log = SimLog(self.storage, JOURNAL, is_kept=True)

    def begin(self, epoch: int) -> SimLines:
        self.log.begin_writer(epoch)
        lease = SimLease(epoch, epoch, lambda: self.log.newest_epoch)
        hooks = WriterHooks(lambda: self.now, self.sleep, lambda: False, lambda: None, lambda: None)
        return SimLines(self.log, lease, hooks)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_command_whose_line_is_not_durable_is_detected() -> None:
    journal = Log()
    lines, key = journal.begin(1), key_of(STOP)
    journal.log.expect([key])
    with pytest.raises(AssertionError, match="before its line is durable"):
        journal.log.check_durable(key)
    lines.make_durable()  # of no line
    lines.write(command_line(0.0, STOP, ControllerState()))
    with pytest.raises(AssertionError, match="before its line is durable"):
        journal.log.check_durable(key)
    lines.make_durable()
    journal.log.check_durable(key)
    assert key != key_of(StopWorker("w2", "silent")) != key_of(StartWorkers(("w2",)))


def test_a_line_of_a_lost_lease_is_not_written() -> None:
    journal = Log()
    lines = journal.begin(1)
    lines.write({"number": 1})
    journal.log.newest_epoch = 2
    with pytest.raises(LeaseLost):
        lines.write({"number": 2})
    assert lines.close() == ""
    with pytest.raises(AssertionError, match="invariant 11"):
        journal.log.append({"number": 3}, epoch=1, now=0.0)
    assert journal.log.lines == [{"number": 1}]


def test_a_dead_controller_loses_newest_lines_that_are_not_durable() -> None:
    kept = []
    for seed in range(20):
        journal = Log()
        lines = journal.begin(1)
        for number in range(6):
            lines.write({"number": number})
            if number == 1:
                lines.make_durable()
            if number == 3:
                journal.now += LAG_S
        journal.log.end_writer(Random(seed), journal.now)
        journal.begin(2)
        read = [line["number"] for line in LineLog(journal.storage, JOURNAL).lines()]
        assert read == list(range(len(read)))
        kept.append(len(read))
    assert set(kept) == {4, 5, 6}


def test_lines_wait_while_storage_refuses_them() -> None:
    journal = Log()
    lines = journal.begin(1)
    journal.log.refuses_until = 10.0
    lines.write({"number": 1})
    assert (lines.num_waiting, bool(lines.trouble)) == (1, True)
    assert "not written" in lines.close(patience_s=5.0)
    assert lines.close(patience_s=20.0) == ""
    assert journal.log.lines == [{"number": 1}] and not lines.trouble


def test_an_exception_that_no_fault_raised_fails_the_simulation() -> None:
    def inflict(world: World, action: str, worker: SimWorker) -> None:
        world.shell.post("no event")  # type: ignore[arg-type]

    world = World(Scenario(faults=[Fault("a defect", "compute")]), inflict)
    with pytest.raises(CheckFailed, match="no event"):
        run_controllers(world)


def test_the_faults_of_the_shell_strike() -> None:
    counts: Counter[str] = Counter()
    for seed in range(30):
        world = simulate(drawn_with_shell_faults(seed))
        counts.update(action for _, action, _ in world.struck)
        for _, event, _, _ in world.records.trace:
            if isinstance(event, ControllerRaised):
                assert event.message.startswith("InjectedError")
                counts["raised"] += 1
            elif isinstance(event, RunOpened) and event.incarnation > 1:
                counts["opened again"] += 1
    assert counts["raise in the core"] and counts["raise in a command"]
    assert counts["refuse the logs"] and counts["take the lease"]
    assert counts["raised"] >= 10 and counts["opened again"] >= counts["take the lease"]
