"""Fixtures of the process tests: the reference geometry of `tests/properties`, and an S3 server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3 import S3Proxy, start_s3_with_credentials

sys.path.append(str(Path(__file__).parents[1] / "properties"))
sys.path.append(str(Path(__file__).parents[2]))  # the examples are not installed


@pytest.fixture
def s3_proxy() -> Iterator[S3Proxy]:
    """An S3 server of one test; its credentials are in the environment."""
    with start_s3_with_credentials() as proxy:
        yield proxy
