"""Which pytest-xdist worker runs which tests: one has those on Ray, one those of plain processes,
and both share the pure ones when they are done.

A plugin of pytest, which `conftest.py` loads where pytest-xdist is installed. (The marker
`xdist_group` of pytest-xdist 3.8 has no effect under pytest 9.2.)
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

LANES = {"gpu": "ray", "ray": "ray", "processes": "processes"}
"""Of the folders whose tests start processes: one worker runs all tests of a lane, in turn. With
one name for all of them nothing but pure tests runs beside them; that takes longer."""
EACH_ALONE = ("sim",)
"""Folders whose tests share nothing: any worker may run any of them. Of the other folders each file
is run by one worker, so that its fixtures are made once."""


def folder_of(nodeid: str) -> str:
    """`unit` of `tests/unit/test_wire.py::test_x`; empty for a file that lies elsewhere."""
    words = nodeid.partition("::")[0].split("/")
    return words[1] if words[0] == "tests" and len(words) > 2 else ""


def is_one_after_another(nodeid: str) -> bool:
    return folder_of(nodeid) in LANES


class ByFolder(LoadScopeScheduling):
    """Gives each scope to one worker; the first scope in the order of the tests goes first."""

    def _split_scope(self, nodeid: str) -> str:
        folder = folder_of(nodeid)
        if folder in LANES:
            return LANES[folder]
        return nodeid if folder in EACH_ALONE else nodeid.partition("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests that take longest begin first."""
    items.sort(key=lambda item: not is_one_after_another(item.nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFolder:
    return ByFolder(config, log)
