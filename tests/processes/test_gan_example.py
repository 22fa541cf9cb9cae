"""The converted example of a GAN with averaged weights equals the one before, through kills."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from example_pairs import output_before, run_after

NAME = "gan"


@pytest.mark.soak
def test_converted_gan_equals_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The averaged weights, too, which the script itself computes."""
    monkeypatch.chdir(tmp_path)
    expected = output_before(NAME)
    averaged = torch.load("generator.pt")
    Path("generator.pt").unlink()
    losses = [float(loss) for loss in re.findall(r"(?:critic|generator) ([\d.]+)", expected)]
    run = run_after(tmp_path / "run", NAME)
    assert len(losses) == 36
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-4)
    for name, value in torch.load("generator.pt").items():
        torch.testing.assert_close(value, averaged[name], rtol=1e-3, atol=1e-4)
