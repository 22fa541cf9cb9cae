"""The floating-point operations of a step, and what a device can do at most."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from elastic.planner.devices import device_of
from pipelines.settings import TrainSettings
from pipelines.training.replica.depth import Measured, measure_depth
from pipelines.training.workload.parallel_groups import ALONE
from pipelines.training.workload.state import build_on_meta
from pipelines.training.workload.workload import PADDING, Workload

FORWARD_AND_BACKWARD = 3
"""Operations of both passes for each of the forward pass: the backward pass has twice as many."""


def count_step_flops(workload: Workload, settings: TrainSettings) -> float | None:
    """The operations of a step's forward and backward passes on all workers together, or None.

    torch counts matrix products, convolutions and attention of a sample's forward pass on the meta
    device: no value is computed. Causal attention counts as if it were whole, and recomputation
    does not count (Chowdhery et al., PaLM, 2022, appendix B). Where a module cannot run there, as
    one with experts, the costs of its layers count: causal attention by half. The code of a custom
    module may not expect the meta device: see `ForwardFlops`.
    """

    def measure(workload: Workload) -> Measured:
        module = build_on_meta(workload, settings).eval()
        fed = workload.feed(workload.empty(1), torch.device("meta"), ALONE, PADDING)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            workload.losses(module, fed, ALONE)
        return {"flops": counter.get_total_flops()}

    try:
        flops = measure_depth(workload, measure)["flops"]
    except Exception:  # any kernel may refuse meta tensors in its own way
        products = sum(layer.cost for layer in workload.shape().layers)
        flops = 2 * products * workload.seq_len
    return FORWARD_AND_BACKWARD * flops * settings.batch or None


class ForwardFlops:
    """Counts the operations of a module's first forward pass, in the warm-up.

    Later passes are left alone: in this one, `torch.compile` compiles nothing.
    """

    def __init__(self) -> None:
        self._counter = FlopCounterMode(display=False)
        self._hooks: list[RemovableHandle] = []

    def watch(self, module: nn.Module) -> None:
        self._hooks = [
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end, always_call=True),
        ]

    def of_step(self, settings: TrainSettings) -> float | None:
        """The operations of a step, with twice as many in backward, or None if the module was not
        called. The first pass had one microbatch."""
        forward = self._counter.get_total_flops()
        return FORWARD_AND_BACKWARD * forward * settings.batch / settings.microbatch or None

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._counter.__enter__()

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._counter.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()


def peak_flops(device_name: str, settings: TrainSettings) -> float | None:
    """The most operations that a device can do in a second, or None if that is not known.

    Only for half precision: for other data types `peak_tflops` sets the peak.
    """
    if settings.peak_tflops is not None:
        return settings.peak_tflops * 1e12
    if settings.dtype not in ("bfloat16", "float16"):
        return None
    device = device_of(device_name)
    return device.peak_flops(settings.dtype) if device else None
