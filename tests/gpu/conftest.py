"""Makes the harness of the process tests, and what `make gpu` measures, importable here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "processes"))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
