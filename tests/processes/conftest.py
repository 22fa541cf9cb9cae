"""Lets the tests in plain processes use the geometry by elements of those of laws."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "properties"))
