"""Schedulers are stepped on trial before a run, without a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_loop import MODULE
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from pipelines.loop.state.script_values import ScriptValues


def one_after_the_other(optimizer: Optimizer) -> LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 5)]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: [1.0, 0.5, 0.1][step]),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "SequentialLR": one_after_the_other,
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o)]),
    "SWALR": lambda o: SWALR(o, 0.05),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_pass_their_trial_and_are_as_before(name: str) -> None:
    optimizer = SGD(MODULE.parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    values = ScriptValues([optimizer], [scheduler])
    before = str((scheduler.state_dict(), values._read()))
    values.try_schedulers(20)
    assert str((scheduler.state_dict(), values._read())) == before
