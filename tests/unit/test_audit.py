"""Checksums detect every flipped bit, and a comparison groups the workers by what they hold."""

from __future__ import annotations

from random import Random

import pytest
import torch
from users_policy import users_policy

from actors.runtime.fault_spec import Fault
from actors.runtime.faults import FaultInjector
from actors.worker.audit import ROW, checksum
from elastic.controller.audit import compare
from elastic.controller.core import Core
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_records import VoidedCheckpoints
from elastic.protocol.duty_state import CheckpointDuty
from elastic.protocol.events import RunOpened, Saved

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_elements", [1, ROW - 1, ROW, 3 * ROW + 5])
def test_each_flipped_bit_changes_the_checksum(dtype: torch.dtype, num_elements: int) -> None:
    random = Random(f"{dtype}/{num_elements}")
    torch.manual_seed(0)
    tensors = {"a": (50 * torch.randn(num_elements)).to(dtype), "b": torch.zeros((), dtype=dtype)}
    before = checksum(tensors)
    raw = tensors["a"].view(torch.uint8)
    for _ in range(200):
        place, bit = random.randrange(len(raw)), 1 << random.randrange(8)
        raw[place] ^= bit
        assert checksum(tensors) != before
        raw[place] ^= bit
    assert checksum(tensors) == before


def test_checksum_depends_on_names_and_positions_not_on_memory_order() -> None:
    torch.manual_seed(0)
    tensors = {"a": torch.randn(2, 2 * ROW), "b": torch.randn(2, 2 * ROW)}
    assert checksum({"a": tensors["b"], "b": tensors["a"]}) != checksum(tensors)
    assert checksum({"a": tensors["a"].flip(0), "b": tensors["b"]}) != checksum(tensors)
    assert checksum({"b": tensors["b"], "a": tensors["a"]}) == checksum(tensors)
    strided = tensors["a"].T.contiguous().T
    assert not strided.is_contiguous()
    assert checksum(tensors | {"a": strided}) == checksum(tensors), "strides do not matter"
    assert checksum(tensors | {"c": torch.empty(0)}) == checksum(tensors), (
        "empty tensors do not matter"
    )


def test_checksum_distinguishes_signed_zeros_and_accepts_nans() -> None:
    zero, nan = torch.zeros(3), torch.full((3,), torch.nan)
    assert checksum({"a": zero}) != checksum({"a": -zero})
    assert checksum({"a": nan}) == checksum({"a": nan.clone()})


WORKERS = ("w0", "w1", "w2", "w3")


@pytest.mark.parametrize(
    ("parts", "sums", "expected"),
    [
        ((7, 7, 7, 7), (1, 1, 1, 1), (4, ())),
        ((7, 7, 7, 7), (1, 2, 1, 1), (4, ((("w0", "w2", "w3"), ("w1",)),))),
        ((7, 8, 7, 8), (1, 2, 1, 2), (2, ())),
        ((7, 8, 7, 8), (1, 2, 3, 2), (2, ((("w0",), ("w2",)),))),
        ((7, 7, 7, 8), (1, 2, 1, 2), (1, ((("w0", "w2"), ("w1",)),))),
        ((1, 2, 3, 4), (1, 1, 1, 1), (1, ())),
    ],
)
def test_compare_groups_holders_of_the_same_part(parts, sums, expected) -> None:
    assert compare(WORKERS, parts, sums) == expected


def test_flip_fault_flips_one_bit_once_in_the_trained_tensor() -> None:
    whole = torch.ones(4, 6)
    shard = whole[:, 2:4]
    faults = FaultInjector("w1", (Fault("flip", "w1", 7), Fault("flip", "w2", 7)))
    for step in (6, 7, 7, 8):
        faults.flip_a_bit(step, lambda: {"none": torch.empty(0), "shard": shard})
        faults.at("compute", step)
        assert shard[0, 0].item() == (1.0 if step == 6 else 1.0625)
    assert whole.sum() == 24 + 0.0625


def test_checkpoints_that_a_rollback_voided_are_ignored_and_removed() -> None:
    saved = tuple(Saved(step, g, f"step-{step}-g{g}") for step, g in ((4, 1), (8, 1), (12, 3)))
    usable_steps = []
    for voided in (
        (),
        (VoidedCheckpoints(5, 4),),
        (VoidedCheckpoints(5, 2),),
        (VoidedCheckpoints(5, 2), VoidedCheckpoints(9, 4)),
        (VoidedCheckpoints(3, 4),),
    ):
        core = Core(ControllerState(checkpoints=CheckpointDuty(voided=voided)))
        core.step(0.0, RunOpened(1, users_policy(), TargetLayout(), Job(8, steps=99), saved))
        usable_steps.append([checkpoint.step for checkpoint in core.state.checkpoints.saved])
        assert {checkpoint.step for checkpoint in saved} - set(usable_steps[-1]) == {
            step for step, _ in core.state.checkpoints.stale
        }
    assert usable_steps == [[4, 8, 12], [4], [4, 12], [4], []]
