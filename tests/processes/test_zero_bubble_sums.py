"""Zero bubble in bfloat16 sums the gradients of microbatches in float32, as other schedules do."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from expected import expected
from test_layouts import DENSE, MIXED, NUM_STEPS, Case, train_cases, with_settings
from test_replica import Trained

pytestmark = pytest.mark.slow

LAYOUTS = {
    "pp=2": DENSE,
    "pp=2,vp=2,fsdp=2,zero=2": DENSE,
    "pp=2,vp=2,fsdp=2": DENSE,
    "pp=2,fsdp=2,ep=2": MIXED,
}
SCHEDULES = ("interleaved_1f1b", "zero_bubble")


def case_of(layout: str, schedule: str) -> Case:
    changes = {"schedule": schedule, "dtype": "bfloat16", "batch": 16}
    return Case(layout, with_settings(LAYOUTS[layout], **changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cases = [case_of(*pair) for pair in product(LAYOUTS, SCHEDULES)]
    return train_cases(tmp_path_factory.mktemp("sums"), cases)


def trained_by(folder: Path, case: Case, world_rank: int) -> Trained:
    return Trained(**torch.load(folder / f"{case.name}-{world_rank}.pt", weights_only=False))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_bubble_in_bfloat16_equals_another_schedule(folder: Path, layout: str) -> None:
    other, actual = (trained_by(folder, case_of(layout, name), 0) for name in SCHEDULES)
    assert actual.losses == pytest.approx(other.losses, rel=1e-6)
    assert actual.norms == pytest.approx(other.norms, rel=1e-6)
    for name, tensor in other.tensors.items():
        torch.testing.assert_close(actual.tensors[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_bubble_in_bfloat16_is_close_to_the_plain_loop(folder: Path, layout: str) -> None:
    case = case_of(layout, "zero_bubble")
    in_float64 = case.settings.model_copy(update={"dtype": "float64"})
    losses, norms = zip(*expected(in_float64, NUM_STEPS)[0], strict=True)
    trained = trained_by(folder, case, 0)
    assert trained.losses == pytest.approx(losses, rel=0.01)
    assert trained.norms == pytest.approx(norms, rel=0.02)
