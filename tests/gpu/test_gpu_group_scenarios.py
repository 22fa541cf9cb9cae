"""Generations of NCCL groups of several processes on one GPU, as those of the fake NCCL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from gpu_groups import separate_hosts
from group_scenarios import ABORT_AFTER_S, WORKERS, run_rank
from one_gpu import NEEDS_GPU
from test_group_backends import DEATHS, MAX_ABORT_S, assert_recovered, run_scenario

pytestmark = NEEDS_GPU


def run_rank_on_gpu(*arguments: Any) -> None:
    separate_hosts()
    run_rank(*arguments)
    os._exit(0)  # a thread that was left behind may still wait in NCCL


def run_on_gpu(folder: Path, scenario: str, num_ranks: int) -> dict[str, dict[str, float]]:
    return run_scenario(folder, "cuda", scenario, num_ranks, run_rank_on_gpu)


def test_groups_shrink_grow_and_move_state(tmp_path: Path) -> None:
    assert run_on_gpu(tmp_path, "changes", 4).keys() == set(WORKERS)


@pytest.mark.parametrize(
    "scenario", ["death_before_forming", "death_in_forming", "death_between_groups"]
)
def test_death_in_forming_strands_no_survivor(tmp_path: Path, scenario: str) -> None:
    measured = run_on_gpu(tmp_path, scenario, 4)
    assert measured.keys() == set(WORKERS) - {"w2"}
    for worker, values in measured.items():
        assert values["blocked_s"] < ABORT_AFTER_S + MAX_ABORT_S, worker


@pytest.mark.parametrize("scenario", DEATHS)
def test_survivors_of_a_death_form_again(tmp_path: Path, scenario: str) -> None:
    assert_recovered(run_on_gpu(tmp_path, scenario, 3))


def test_abort_ends_each_blocked_collective(tmp_path: Path) -> None:
    measured = run_on_gpu(tmp_path, "abort_during_collectives", 2)
    assert ABORT_AFTER_S * 0.9 < measured["w0"]["blocked_s"] < ABORT_AFTER_S + MAX_ABORT_S
