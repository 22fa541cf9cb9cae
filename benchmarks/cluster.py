"""A Ray cluster of our own on this machine, to which nodes can be added while a run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
...
