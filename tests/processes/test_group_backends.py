"""Generations of groups on Gloo, and on NCCL's backend with a library that behaves as NCCL does."""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_nccl import FakeEnd, FakeNccl
from group_scenarios import ABORT_AFTER_S, HOST, WORKERS, run_rank
from torch.distributed import HashStore
from torch.multiprocessing import ProcessExitedException, start_processes

from actors.distributed.backends import nccl
from actors.distributed.backends.backend import bare_group, dissolve_groups, init_world
from actors.distributed.backends.nccl import GroupsAborted, NcclBackend
from actors.distributed.meshes import form_groups
from actors.distributed.store import open_store
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout

BACKENDS = ("gloo", "nccl")
MAX_ABORT_S = 5.0
"""Far below the timeout of the groups; an abort takes some ms on an idle machine."""
TIMEOUT = timedelta(seconds=20)


def run_scenario(
    folder: Path,
    backend: str,
    scenario: str,
    num_ranks: int,
    run: Callable[..., None] = run_rank,
) -> dict[str, dict[str, float]]:
    """What each process measured that lived to the end."""
    set_forkserver_preload(["group_scenarios"])
    store = open_store(HOST)
    processes = start_processes(
        run,
        (store.port, folder, backend, scenario),
        num_ranks,
        join=False,
        start_method="forkserver",
    )
    try:
        while not processes.join(grace_period=60.0):
            pass
    except ProcessExitedException as error:
        assert error.signal_name == "SIGKILL" and error.error_index == 2, "only w2 is to die"
    raised = [Path(name) for name in processes.error_files if Path(name).exists()]
    assert not raised, [pickle.loads(path.read_bytes()) for path in raised]
    return {path.name: json.loads(path.read_text()) for path in folder.iterdir()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_shrink_grow_and_move_state(tmp_path: Path, backend: str) -> None:
    assert run_scenario(tmp_path, backend, "changes", 4).keys() == set(WORKERS)


@pytest.mark.parametrize(
    "scenario", ["death_before_forming", "death_in_forming", "death_between_groups"]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_death_in_forming_strands_no_survivor(tmp_path: Path, backend: str, scenario: str) -> None:
    measured = run_scenario(tmp_path, backend, scenario, 4)
    assert measured.keys() == set(WORKERS) - {"w2"}
    for worker, values in measured.items():
        # Gloo raises before the abort where it has a connection to the dead rank.
        assert values["blocked_s"] < ABORT_AFTER_S + MAX_ABORT_S, worker


DEATHS = ["death_in_collective", "death_before_collective", "death_in_launch"]


@pytest.mark.parametrize("scenario", DEATHS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_survivors_of_a_death_form_again(tmp_path: Path, backend: str, scenario: str) -> None:
    measured = run_scenario(tmp_path, backend, scenario, 3)
    assert_recovered(measured)


def assert_recovered(measured: dict[str, dict[str, float]]) -> None:
    assert measured.keys() == {"w0", "w1"}
    for worker, values in measured.items():
        assert values["blocked_s"] < ABORT_AFTER_S + MAX_ABORT_S, worker
        assert values["recovered_s"] < MAX_ABORT_S, worker


@pytest.mark.parametrize("backend", BACKENDS)
def test_abort_ends_each_blocked_collective(tmp_path: Path, backend: str) -> None:
    measured = run_scenario(tmp_path, backend, "abort_during_collectives", 2)
    assert ABORT_AFTER_S * 0.9 < measured["w0"]["blocked_s"] < ABORT_AFTER_S + MAX_ABORT_S


@pytest.mark.soak
@pytest.mark.parametrize("backend", BACKENDS)
def test_fifty_generations_leave_nothing_behind(tmp_path: Path, backend: str) -> None:
    for values in run_scenario(tmp_path, backend, "cycles", 2).values():
        assert values["new_fds"] <= 2 and values["new_threads"] <= 1


def test_thread_left_behind_while_it_connects_changes_nothing(tmp_path: Path) -> None:
    assert run_scenario(tmp_path, "nccl", "left_behind", 2).keys() == {"w0", "w1"}


class Lonely(FakeNccl):
    """A fake whose groups have one rank; `options` keeps what it returned."""

    def __init__(self) -> None:
        super().__init__(0)
        self.given: list[Any] = []

    def options(self, timeout: timedelta) -> Any:
        self.given.append(super().options(timeout))
        return self.given[-1]

    def _meet(self, end: FakeEnd) -> None:
        pass


@pytest.fixture(scope="module")
def lonely_backend() -> NcclBackend:
    """Once a process: torch accepts the name of a backend once."""
    return NcclBackend(Lonely(), "lonely_nccl", "cpu")


@pytest.fixture
def lonely(lonely_backend: NcclBackend) -> Iterator[NcclBackend]:
    lonely_backend._engine = Lonely()
    lonely_backend.prepare(HashStore(), 1, TIMEOUT)
    yield lonely_backend
    dissolve_groups(lonely_backend)


def engine_of(backend: NcclBackend) -> Lonely:
    engine = backend._engine
    assert isinstance(engine, Lonely)
    return engine


def form_alone(backend: NcclBackend) -> Any:
    init_world(backend, HashStore(), 0, 1, TIMEOUT)
    assignment = Assignment(1, Layout(), ("w0",))
    return form_groups(backend, assignment, 0, torch.device("cpu"), TIMEOUT)


@pytest.mark.parametrize("generation", [1, 2])
def test_each_group_has_its_own_options_and_knows_its_ranks(
    lonely: NcclBackend, generation: int
) -> None:
    """torch leaves the ranks of a default group empty after a process' first, and splits a group
    that is bound to a device: together this ends the process."""
    for _ in range(generation):
        dissolve_groups(lonely)
        lonely.prepare(HashStore(), 1, TIMEOUT)
        engine_of(lonely).given.clear()
        groups = form_alone(lonely)
    assert groups.world.bound_device_id is None
    ends, given = engine_of(lonely).ends, engine_of(lonely).given
    assert len(ends) == len({id(options) for options in given}) == 3  # world, replica, fsdp
    assert {tuple(end.arguments.global_ranks) for end in ends} == {(0,)}


def test_abort_is_requested_of_all_communicators_at_once_world_first(lonely: NcclBackend) -> None:
    form_alone(lonely)
    began = time.monotonic()
    lonely.abort()
    assert time.monotonic() - began < nccl.ABORT_TIMEOUT_S, "an abort waits for the next one"
    calls = engine_of(lonely).calls
    aborts = [call for call in calls if call.startswith("abort")]
    creations = [call for call in calls if call.startswith("create")]
    assert [call.split()[1] for call in aborts] == [call.split()[1] for call in creations]


def test_abort_returns_although_one_never_ends(
    lonely: NcclBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "ABORT_TIMEOUT_S", 0.2)
    form_alone(lonely)
    end = engine_of(lonely).ends[-1]
    hangs, num_calls = threading.Event(), []

    def abort(aborted: FakeEnd) -> None:
        num_calls.append(aborted)
        aborted.is_aborted = True
        if aborted is end:
            hangs.wait()

    monkeypatch.setattr(engine_of(lonely), "abort", abort)
    began = time.monotonic()
    lonely.abort()
    lonely.abort()
    assert 0.4 <= time.monotonic() - began < 2.0
    assert len(num_calls) == 3, "a second call repeats no abort"
    hangs.set()


def test_no_group_is_created_after_an_abort(lonely: NcclBackend) -> None:
    lonely.abort()
    with pytest.raises(GroupsAborted, match="transfer: its generation has been aborted"):
        bare_group(lonely, HashStore(), 0, 1, TIMEOUT)
    assert not engine_of(lonely).calls


def test_end_is_known_before_it_connects(lonely: NcclBackend) -> None:
    """Otherwise an abort would not reach it."""
    known = []
    engine_of(lonely).before_connecting = lambda end: known.append(end in lonely._ends)
    bare_group(lonely, HashStore(), 0, 1, TIMEOUT)
    assert known == [True]


def test_rank_that_does_not_arrive_is_not_waited_for_in_a_communicator(
    lonely: NcclBackend,
) -> None:
    with pytest.raises(dist.DistStoreError):
        lonely.prepare(HashStore(), 2, timedelta(seconds=0.2))
    assert not engine_of(lonely).calls


def test_survivors_are_not_ended_by_the_watchdog(lonely: NcclBackend) -> None:
    assert {name: os.environ.get(name) for name in nccl.SETTINGS} == nccl.SETTINGS
