"""From which distribution `transformers` draws a parameter, found out without drawing it.

The model's own `_init_weights` runs on the meta device, where random operations cost nothing, and
what it does to the parameter is recorded.
"""

from __future__ import annotations

from functools import cache
from math import inf

import torch
from torch import nn

from pipelines.hugging_face.building import initialise_upwards
from pipelines.training.workload.initial_values import Distribution
from pipelines.training.workload.recorded_init import Recorder


@cache
def distribution(model: nn.Module, name: str) -> Distribution | None:
    """That of a parameter or buffer of a model on the meta device; None if it is not drawn in one
    operation from a known distribution."""
    owner, _, key = name.rpartition(".")
    holder = model.get_submodule(owner)
    tensor = holder._parameters.get(key)
    if tensor is None:
        return None
    recorder = Recorder(least_elements=inf)
    recorder.watch(tensor)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), recorder:
        initialise_upwards(model, owner)
    record = recorder.record(tensor)
    return record.distribution if record else None
