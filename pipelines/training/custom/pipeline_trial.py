"""Trial of a custom pipeline before a run: its blocks in order must equal the whole module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pipelines.errors import UserError, first_line
from pipelines.settings import TrainSettings
from pipelines.settings.recipe import Recipe
from pipelines.training.custom.modules.block_flow import in_dtypes, run_layers
from pipelines.training.custom.modules.custom_module import (
    build_on_host,
    count_parameters,
    seeded,
)
from pipelines.training.custom.modules.custom_pipeline import (
    CustomBatch,
    UnfitForPipeline,
    inputs_of,
    module_returning,
    pad_rows,
    unpad_rows,
)
from pipelines.training.custom.modules.microbatch_draws import BlockSeeds
from pipelines.training.workload.parallel_groups import ALONE
from pipelines.training.workload.state import buffers
from pipelines.training.workload.trees import mapped
from pipelines.training.workload.workload import CustomLoss, LossSums, ModelShape

MAX_REAL_PARAMETERS = 20_000_000
"""The trial uses real values up to this number of parameters, and only shapes beyond it."""
NUM_SAMPLES = 2
"""Samples of the trial's microbatch."""
NOISE = 0.05
"""Scale of the noise added to parameters: a parameter of value 0 would hide differences."""


class PipelineCandidate(CustomLoss, Protocol):
    """A custom workload, as the trial sees it."""

    recipe: Recipe
    settings: TrainSettings
    num_held_out: int

    def module(self) -> nn.Module: ...

    def shape(self) -> ModelShape: ...

    def example(self, num_samples: int, held_out: bool = False) -> CustomBatch: ...

    @property
    def block_seeds(self) -> BlockSeeds | None: ...


def why_no_pipeline(
    workload: PipelineCandidate, max_parameters: int = MAX_REAL_PARAMETERS
) -> str | None:
    """The reason why the recipe cannot be trained as a pipeline, or None if it can.

    The trial of a module with more than `max_parameters` parameters compares only shapes.
    """
    try:
        with seeded(workload.settings.seed):
            _try_out(workload, max_parameters)
    except UnfitForPipeline as unfit:
        return str(unfit)
    except UserError:
        raise
    except Exception as error:
        reason = first_line(error)
        return f"the trial of the recipe's pipeline failed: {type(error).__name__}: {reason}"
    return None


class _PassResult(NamedTuple):
    """The results of a pass: the module's output, the sums of each function, gradients, buffers."""

    output: Tensor
    sums: list[LossSums]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def _try_out(workload: PipelineCandidate, max_parameters: int) -> None:
    flow = workload.flow
    for held_out in (False, True):
        if held_out and not (workload.num_held_out and workload.settings.eval_every):
            continue
        batch = workload.example(min(NUM_SAMPLES, workload.settings.microbatch), held_out)
        module = _module(workload, max_parameters).train(not held_out)
        with torch.set_grad_enabled(not held_out):
            before = _buffers(module)
            whole = _run_whole(workload, module, batch)
            module.load_state_dict(before, strict=False)
            module.zero_grad()
            by_blocks = _run_blocks(workload, module, batch)
        _compare(whole, by_blocks, "evaluation" if held_out else "training")
        if held_out:
            with torch.no_grad():
                _refuse_padding(workload, module)
        inputs = inputs_of(workload.loss_in(not held_out), batch.value, not held_out)
        if inputs.shape[1:] != flow[0].shape[1:]:
            raise UnfitForPipeline(
                f"the recipe's loss calls its module with shape {tuple(inputs.shape)} for "
                f"{batch.num_held} samples, but {tuple(flow[0].shape)} for a microbatch: pad "
                "samples to one size in `collate`"
            )


def _module(workload: PipelineCandidate, max_parameters: int) -> nn.Module:
    recipe, seed = workload.recipe, workload.settings.seed
    shapes = workload.module()
    if count_parameters(shapes) > max_parameters:
        return in_dtypes(shapes.to("meta"), recipe)
    module = in_dtypes(build_on_host(recipe.model, seed), recipe)
    if workload.block_seeds is not None:
        workload.block_seeds.attach(module)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.add_(NOISE * torch.randn_like(parameter))
    return module


def _placed(module: nn.Module, batch: CustomBatch) -> CustomBatch:
    device = next((value.device for value in module.parameters()), torch.device("cpu"))
    return batch._replace(value=mapped(lambda tensor: tensor.to(device), batch.value))


def _run_whole(workload: PipelineCandidate, module: nn.Module, batch: CustomBatch) -> _PassResult:
    outputs: list[Any] = []
    hook = module.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    workload.begin_loss(batch, module.training)
    with nullcontext() if module.training else _randomness_refused():
        sums = [
            kind(module, _placed(module, batch), ALONE) for kind in workload.kinds(module.training)
        ]
    hook.remove()
    if len(outputs) != len(sums):
        raise UnfitForPipeline(
            f"the recipe's losses call their module {len(outputs) / len(sums):.3g} times each, but "
            "a pipeline runs once"
        )
    if not isinstance(outputs[0], Tensor):
        raise UnfitForPipeline(
            f"the recipe's module returns {type(outputs[0]).__name__}, but a pipeline passes on "
            "one tensor"
        )
    return _PassResult(outputs[0], sums, _gradients(module, sums[0].loss), _buffers(module))


def _run_blocks(workload: PipelineCandidate, module: nn.Module, batch: CustomBatch) -> _PassResult:
    training, value = module.training, _placed(module, batch).value
    workload.begin_loss(batch, training)
    inputs = inputs_of(workload.loss_in(training), value, training)
    for name, metric in () if training else workload.recipe.metrics.items():
        if not _alike(inputs_of(metric, value, training), inputs):
            raise UnfitForPipeline(
                f"the metric {name} calls the module with other inputs than the loss: use the same"
            )
    *_, output = run_layers(module, workload.shape().layers, inputs)
    workload.begin_loss(batch, training)
    called = workload.behind_blocks
    sums = [
        kind(module_returning(output, training, called), _placed(module, batch), ALONE)
        for kind in workload.kinds(training)
    ]
    return _PassResult(output, sums, _gradients(module, sums[0].loss), _buffers(module))


def _gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    if not torch.is_grad_enabled():
        return {}
    loss.backward()
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in module.named_parameters()
    }


@contextmanager
def _randomness_refused() -> Iterator[None]:
    """Raise `UnfitForPipeline` if the block draws random numbers."""
    generator = torch.get_rng_state()
    yield
    if not torch.equal(torch.get_rng_state(), generator):
        raise UnfitForPipeline(
            "an evaluation of the recipe's module draws random numbers, but in a pipeline each "
            "stage would draw others: draw only if module.training"
        )


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in buffers(module)}


def _compare(whole: _PassResult, by_blocks: _PassResult, mode: str) -> None:
    message = (
        f"in {mode} the blocks of the recipe's pipeline, called in order, do not give the {{}} of "
        "its module: each must take the output of the one before, with nothing in between"
    )
    if not _alike(whole.output, by_blocks.output):
        raise UnfitForPipeline(message.format("output"))
    for expected, actual in zip(whole.sums, by_blocks.sums, strict=True):
        if not _alike(expected[0], actual[0]) or not _alike(expected[1], actual[1]):
            raise UnfitForPipeline(message.format("losses"))
    for name, buffer in whole.buffers.items():
        if not _alike(buffer, by_blocks.buffers[name]):
            raise UnfitForPipeline(message.format(f"buffers ({name})"))
    for name, gradient in whole.gradients.items():
        if not _alike(gradient, by_blocks.gradients[name]):
            raise UnfitForPipeline(message.format(f"gradients (of {name})"))


def _alike(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return first.is_meta or torch.allclose(first, second, rtol=1e-4, atol=1e-6, equal_nan=True)


def _refuse_padding(workload: PipelineCandidate, module: nn.Module) -> None:
    """Raise `UnfitForPipeline` if padding an evaluation's smaller last microbatch changes its
    output."""
    size = workload.settings.microbatch
    num_samples = workload.settings.num_evaluated(workload.num_held_out)
    if not workload.settings.eval_every or num_samples % size == 0:
        return
    batch = _placed(module, workload.example(num_samples % size, held_out=True))
    inputs = inputs_of(workload.loss_in(False), batch.value, False)
    layers = workload.shape().layers
    *_, plain = run_layers(module, layers, inputs)
    *_, padded = run_layers(module, layers, pad_rows(inputs, len(workload.flow[0])))
    if not _alike(plain, unpad_rows(padded, batch.num_held, size)):
        raise UnfitForPipeline(
            f"the output of a sample depends on others of its microbatch, so the {num_samples} "
            f"held-out samples must be a multiple of {size}: --set eval_samples="
            f"{max(num_samples // size * size, size)}"
        )
