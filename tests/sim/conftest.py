"""Fixtures that give tests their seeds, and a report that says how to replay a failing seed."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest
from sim.fresh_seeds import FreshSeeds, fresh, keep, replay

CURRENT = pytest.StashKey[int]()


@pytest.fixture
def fresh_seeds(request: pytest.FixtureRequest) -> FreshSeeds:
    """The seeds of a chunk, from its first number and its size; new with each commit."""
    node = request.node

    def seeds(first: int, number: int) -> Iterator[int]:
        for seed in fresh(node.originalname, first, number):
            node.stash[CURRENT] = seed
            yield seed

    return seeds


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    seed = item.stash.get(CURRENT, None)
    if report.when == "call" and report.failed and seed is not None:
        command = replay(item.nodeid.partition("[")[0], seed)
        report.sections.append(("seed", f"seed {seed} failed; replay it: {command}"))
        if os.environ.get("ELASTIC_KEEP_SEEDS"):
            keep(item.originalname, seed)
    return report
