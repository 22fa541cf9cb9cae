"""The converted example of a GAN with averaged weights equals the one before, through kills."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from example_pairs import output_before, run_after

NAME = "gan"


def test_converted_gan_equals_the_one_before(tmp_path: Path) -> None:
    expected = output_before(NAME)
    losses = [float(loss) for loss in re.findall(r"(?:critic|generator) ([\d.]+)", expected)]
    run = run_after(tmp_path, NAME)
    assert len(losses) == 36
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-4)
