"""What all tests share: Hypothesis settings, and how pytest-xdist distributes tests.

Hypothesis has no deadlines, which a busy machine would miss, the same examples at each run, and no
files of its own.
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
