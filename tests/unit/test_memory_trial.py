"""The memory trial counts without values what a real pass keeps, and less with recomputation."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from pipelines.run.program import make_workload
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings, TrainSettings
from pipelines.training.replica.memory_trial import LiveBytes, pass_memory_of
from pipelines.training.workload.parallel_groups import ALONE
from pipelines.training.workload.workload import PADDING

SETTINGS = tiny().model_copy(
    update={"data": DataSettings(source="random", seq_len=32), "microbatch": 4}
)


def real_peak(settings: TrainSettings) -> tuple[int, int]:
    """The bytes that a real forward keeps, and the peak of forward and backward."""
    workload = make_workload(settings)
    module = workload.module(ALONE)
    live = LiveBytes([*module.parameters(), *module.buffers()])
    with live:
        batch = workload.empty(settings.microbatch)
        fed = workload.feed(batch, torch.device("cpu"), ALONE, PADDING)
        del batch
        loss = workload.losses(module, fed, ALONE).loss
        kept = live.now
        loss.backward()
    return kept, live.peak


def test_trial_counts_what_a_real_pass_keeps() -> None:
    trial = pass_memory_of(make_workload(SETTINGS), SETTINGS)
    kept, peak = real_peak(SETTINGS)
    assert trial.blocks_bytes + trial.outer_bytes == pytest.approx(kept, rel=0.02)
    gradients = sum(p.nbytes for p in make_workload(SETTINGS).module(ALONE).parameters())
    assert trial.last_bytes + gradients <= peak * 1.02
    assert trial.num_operations > 100


def test_recomputation_keeps_less_and_backward_needs_more() -> None:
    full = SETTINGS.model_copy(update={"activation_checkpointing": "full"})
    trial = pass_memory_of(make_workload(full), full)
    plain = pass_memory_of(make_workload(SETTINGS), SETTINGS)
    assert trial.blocks_bytes < plain.blocks_bytes / 5
    assert trial.block_bytes > plain.block_bytes


def test_tensor_parallelism_divides_most_activations() -> None:
    whole = pass_memory_of(make_workload(SETTINGS), SETTINGS)
    half = pass_memory_of(make_workload(SETTINGS), SETTINGS, tp=2)
    assert half.tp == 2 and not torch.distributed.is_initialized()
    assert whole.blocks_bytes / 2 <= half.blocks_bytes < whole.blocks_bytes * 0.7


def test_live_bytes_fall_when_tensors_are_freed() -> None:
    live = LiveBytes()
    with live:
        first = torch.zeros(1000)
        second = nn.functional.relu(first)
        assert live.now == 8000
        del first
        assert live.now == 4000
        del second
    gc.collect()
    assert (live.now, live.peak) == (0, 8000)
