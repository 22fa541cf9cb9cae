"""Distributes the tests over pytest-xdist workers: one runs those on Ray, one those of plain
processes, and the first to finish runs pure tests.

A plugin of pytest, which `conftest.py` loads if pytest-xdist is installed. (The marker
`xdist_group` of pytest-xdist 3.8 has no effect under pytest 9.2.)
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

LANES = {"gpu": "ray", "ray": "ray", "processes": "processes"}
"""Lanes of the folders whose tests start processes: one worker runs all tests of a lane, one at a
time. A single lane for all of them would take longer: only pure tests could run beside it."""
EACH_ALONE = ("sim",)
"""Folders whose tests share nothing: any worker may run any of them. In the other folders one
worker runs each file, so that its fixtures are created once."""


def folder_of(nodeid: str) -> str:
    """`unit` of `tests/unit/test_wire.py::test_x`; empty for a file in no such folder."""
    words = nodeid.partition("::")[0].split("/")
    return words[1] if words[0] == "tests" and len(words) > 2 else ""


def runs_in_a_lane(nodeid: str) -> bool:
    return folder_of(nodeid) in LANES


class ByFolder(LoadScopeScheduling):
    """Gives each scope to one worker, in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        folder = folder_of(nodeid)
        if folder in LANES:
            return LANES[folder]
        return nodeid if folder in EACH_ALONE else nodeid.partition("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of the lanes, which take longest, to the front."""
    items.sort(key=lambda item: not runs_in_a_lane(item.nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFolder:
    return ByFolder(config, log)
