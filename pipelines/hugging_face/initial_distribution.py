"""The distribution from which `transformers` draws a parameter, determined without drawing it.

The model's `_init_weights` runs on the meta device, where random operations cost nothing, and a
recorder notes the operations on the parameter.
"""

from __future__ import annotations

from functools import cache
from math import inf

import torch
from torch import nn

from actors.distributed.torch_private import direct_parameters
from pipelines.hugging_face.building import initialise_upwards
from pipelines.training.workload.initial_values import Distribution
from pipelines.training.workload.recorded_init import Recorder


@cache
def distribution(model: nn.Module, name: str) -> Distribution | None:
    """The distribution of a parameter of a model on the meta device.

    None for a buffer, and for a parameter that no single draw from a known distribution fills.
    """
    owner, _, key = name.rpartition(".")
    holder = model.get_submodule(owner)
    tensor = direct_parameters(holder).get(key)
    if tensor is None:
        return None
    recorder = Recorder(least_elements=inf)
    recorder.watch(tensor)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), recorder:
        initialise_upwards(model, owner)
    record = recorder.record(tensor)
    return record.distribution if record else None
