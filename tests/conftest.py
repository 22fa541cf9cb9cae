"""Shared by all tests: the Hypothesis settings and the distribution over pytest-xdist workers.

Hypothesis uses no deadlines, which a busy machine would miss, the same examples in each run, and
no database.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from sim.fresh_seeds import base

settings.register_profile("steady", deadline=None, derandomize=True, database=None)
settings.load_profile("steady")


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.import_plugin("distribution")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"simulator seeds: ELASTIC_SIM_BASE={base()} repeats them")
