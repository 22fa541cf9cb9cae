"""Tensor and sequence parallelism: the modules that `tp` cuts, and a loss over parts of logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from pipelines.training.workload import Shape, Style

SEQUENCE = Shard(1)
"""Between the cut modules hidden states (batch, length, dim) are spread over the sequence."""


def cut_modules(module: nn.Module, shape: Shape, mesh: DeviceMesh) -> None:
    """Cut the modules that have a style over `tp` (Shoeybi et al., Megatron-LM, 2019; norms over
    the sequence: Korthikanti et al., 2022).

    Every module takes and gives plain local tensors.
    """
    for name, part in list(module.named_modules()):
        style = shape.style_of(name)
        if style == "replicated":
            distribute_module(part, mesh)
        elif style is not None:
            parallelize_module(part, mesh, _style(style))


def whole_vocabulary(logits: Tensor, mesh: DeviceMesh, vocab_size: int) -> DTensor:
    """Logits (tokens, this rank's part of the vocabulary) as a part of the whole, for a loss under
    `torch.distributed.tensor.parallel.loss_parallel`."""
    shape = torch.Size((logits.shape[0], vocab_size))
    return DTensor.from_local(
        logits, mesh, [Shard(1)], run_check=False, shape=shape, stride=(vocab_size, 1)
    )


def _style(style: Style) -> ParallelStyle:
    match style:
        case "gather":
            return PrepareModuleInput(
                input_layouts=SEQUENCE, desired_input_layouts=Replicate(), use_local_output=True
            )
        case "colwise":
            return ColwiseParallel()
        case "rowwise":
            return RowwiseParallel(output_layouts=SEQUENCE)
        case "sequence":
            return SequenceParallel(use_local_output=True)
        case "vocabulary":
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE)
        case "logits":
            return ColwiseParallel(input_layouts=SEQUENCE)
        case _:
            raise ValueError(f"{style}: no style of a module that tp cuts")
