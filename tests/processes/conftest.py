"""Lets the tests in plain processes use the geometry by elements of those of laws, and S3."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3 import Door, s3_with_keys

sys.path.append(str(Path(__file__).parents[1] / "properties"))


@pytest.fixture
def door() -> Iterator[Door]:
    """An S3 server of the test's own, and the keys to it in the environment."""
    with s3_with_keys() as opened:
        yield opened
