"""Makes the harness of the process tests importable for the GPU tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "processes"))
