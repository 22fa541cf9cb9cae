"""Lets the tests on a GPU use the harness of those in plain processes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "processes"))
