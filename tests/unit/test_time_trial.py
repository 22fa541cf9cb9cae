"""The time trial of one worker: what it measures of a small transformer."""

from __future__ import annotations

import torch

from elastic.geometry.layout import Layout
from pipelines.run.program import TrainingProgram
from pipelines.settings import DataSettings, TrainSettings, TransformerSettings
from pipelines.training.replica.time_trial import time_facts

SETTINGS = TrainSettings(
    model=TransformerSettings(dim=32, num_layers=2, num_heads=4, hidden_dim=64),
    data=DataSettings(source="random", seq_len=16),
    batch=8,
    microbatch=1,
    eval_every=0,
)


def test_trial_measures_sharding_kinds_and_counts_collectives() -> None:
    program = TrainingProgram(SETTINGS.model_dump(mode="json"), device="cpu")
    layouts = [Layout(tp=2), Layout(cp=2)]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    facts = time_facts(program.workload, program.settings, torch.device("cpu"), layouts)
    torch.set_num_threads(num_threads)
    kinds = [(trial.tp, trial.cp, trial.zero) for trial in facts.trials]
    assert kinds == [(1, 1, 0), (1, 1, 1), (1, 1, 2), (1, 1, 3), (2, 1, 0), (1, 2, 0)]
    assert facts.merges and facts.plain is not None and facts.plain.single_s > 0
    cut, split = facts.trials[-2:]
    hidden_bytes = 16 * 32 * 4
    gathers = {t.kind: t for t in cut.traffic}["all_gather"]
    assert gathers.microbatch_bytes == gathers.count * hidden_bytes
    assert [t.kind for t in split.traffic] == ["shift"]
    shares = facts.shares
    whole = sum((*shares.first, *shares.blocks, *shares.last))
    assert abs(whole - 1) < 1e-6 and all(share > 0 for share in shares.blocks)
    assert not torch.distributed.is_initialized()
