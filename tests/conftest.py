"""Shared by all tests: Hypothesis' settings, which tests run, and on which pytest-xdist worker.

Hypothesis uses no deadlines, which a busy machine would miss, the same examples in each run, and
no database.
"""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings
from sim.fresh_seeds import base

settings.register_profile("steady", deadline=None, derandomize=True, database=None)
settings.load_profile("steady")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("which_run")
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.import_plugin("distribution")


def pytest_collection_finish() -> None:
    gc.freeze()  # else each full collection in a test walks the objects of all imports


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"simulator seeds: ELASTIC_SIM_BASE={base()} repeats them")
