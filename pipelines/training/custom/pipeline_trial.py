"""Whether the blocks of a user's own pipeline are the whole module: tried before a run begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipelines.settings.errors import UserError
from pipelines.training.custom.block_flow import in_dtypes, through
from pipelines.training.custom.custom_module import build_for_real, seeded
from pipelines.training.custom.custom_pipeline import (
    Unfit,
    cut_back,
    filled_up,
    having_called,
    inputs_of,
)
from pipelines.training.custom.custom_workload import CustomBatch, CustomWorkload
from pipelines.training.workload.spread import ALONE
from pipelines.training.workload.state import buffers
from pipelines.training.workload.trees import mapped
from pipelines.training.workload.workload import Sums

MOST_TRIED = 20_000_000
"""Parameters of a module that is tried with real values; a larger one is tried in shapes alone."""
NUM_TRIED = 2
"""Samples of the microbatch that is tried."""
NOISE = 0.05
"""Added to parameters in a trial: what begins at 0 would hide what stands behind it."""


def why_no_pipeline(workload: CustomWorkload, most: int = MOST_TRIED) -> str | None:
    """Why the recipe cannot be trained as a pipeline, found out by trying; None if it can. A module
    of more parameters than `most` is tried in shapes alone."""
    try:
        with seeded(workload.settings.seed):
            _try_out(workload, most)
    except Unfit as unfit:
        return str(unfit)
    except UserError:
        raise
    except Exception as error:
        told = (str(error).splitlines() or [""])[0]
        return f"the recipe's pipeline cannot be tried here: {type(error).__name__}: {told}"
    return None


class _Seen(NamedTuple):
    """What a pass has made: the module's output, the sums of each kind, gradients and buffers."""

    output: Tensor
    sums: list[Sums]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def _try_out(workload: CustomWorkload, most: int) -> None:
    flow = workload.flow
    for held_out in (False, True):
        if held_out and not (workload.num_held_out and workload.settings.eval_every):
            continue
        batch = workload.example(min(NUM_TRIED, workload.settings.microbatch), held_out)
        module = _module(workload, most).train(not held_out)
        with torch.set_grad_enabled(not held_out):
            before = _buffers(module)
            whole = _whole(workload, module, batch)
            module.load_state_dict(before, strict=False)
            module.zero_grad()
            row = _in_a_row(workload, module, batch)
        _compare(whole, row, "evaluation" if held_out else "training")
        if held_out:
            with torch.no_grad():
                _refuse_cutting(workload, module)
        inputs = inputs_of(workload.loss_in(not held_out), batch.value, not held_out)
        if inputs.shape[1:] != flow[0].shape[1:]:
            raise Unfit(
                f"the recipe's loss calls its module with {tuple(inputs.shape)} of "
                f"{batch.num_held} samples, and {tuple(flow[0].shape)} of a microbatch: pad "
                "samples to one size in `collate`"
            )


def _module(workload: CustomWorkload, most: int) -> nn.Module:
    recipe, seed = workload.recipe, workload.settings.seed
    shapes = workload.module()
    if sum(one.numel() for one in shapes.parameters()) > most:
        return in_dtypes(shapes.to("meta"), recipe)
    module = in_dtypes(build_for_real(recipe.model, seed), recipe)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.add_(NOISE * torch.randn_like(parameter))
    return module


def _placed(module: nn.Module, batch: CustomBatch) -> CustomBatch:
    device = next((one.device for one in module.parameters()), torch.device("cpu"))
    return batch._replace(value=mapped(lambda one: one.to(device), batch.value))


def _whole(workload: CustomWorkload, module: nn.Module, batch: CustomBatch) -> _Seen:
    outputs: list[Any] = []
    hook = module.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with _without_chance(module):
        sums = [
            kind(module, _placed(module, batch), ALONE) for kind in workload.kinds(module.training)
        ]
    hook.remove()
    if len(outputs) != len(sums):
        raise Unfit(
            f"the recipe's losses call their module {len(outputs) / len(sums):.3g} times each, and "
            "a pipeline runs once"
        )
    if not isinstance(outputs[0], Tensor):
        raise Unfit(
            f"the recipe's module gives {type(outputs[0]).__name__}, and a pipeline passes on one "
            "tensor"
        )
    return _Seen(outputs[0], sums, _gradients(module, sums[0].loss), _buffers(module))


def _in_a_row(workload: CustomWorkload, module: nn.Module, batch: CustomBatch) -> _Seen:
    training, value = module.training, _placed(module, batch).value
    inputs = inputs_of(workload.loss_in(training), value, training)
    for name, metric in () if training else workload.recipe.metrics.items():
        if not _alike(inputs_of(metric, value, training), inputs):
            raise Unfit(f"the metric {name} calls the module with something else than the loss")
    *_, output = through(module, workload.shape().layers, inputs)
    sums = [
        kind(having_called(output, training), _placed(module, batch), ALONE)
        for kind in workload.kinds(training)
    ]
    return _Seen(output, sums, _gradients(module, sums[0].loss), _buffers(module))


def _gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    if not torch.is_grad_enabled():
        return {}
    loss.backward()
    return {
        name: None if one.grad is None else one.grad.clone()
        for name, one in module.named_parameters()
    }


@contextmanager
def _without_chance(module: nn.Module) -> Iterator[None]:
    """Raises `Unfit` if what happens within draws random numbers."""
    generator = torch.get_rng_state()
    yield
    by_chance = not torch.equal(torch.get_rng_state(), generator)
    if by_chance or (module.training and _on_meta(module) and _has_dropout(module)):
        raise Unfit(
            "a pass of the recipe's module or loss draws random numbers, as dropout does, and in a "
            "pipeline each stage would draw others"
        )


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in buffers(module)}


def _on_meta(module: nn.Module) -> bool:
    return any(one.is_meta for one in module.parameters())


def _has_dropout(module: nn.Module) -> bool:
    """Whether a module's attributes say so: on the meta device nothing is drawn."""
    numbers = [
        value
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, float) and ("drop" in name or "Dropout" in type(part).__name__)
    ]
    return any(number > 0 for number in numbers)


def _compare(whole: _Seen, row: _Seen, passes: str) -> None:
    told = (
        f"in {passes} the blocks of the recipe's pipeline, one after the other, do not give the "
        "{} of its module: each has to take what the one before gives, and nothing may happen in "
        "between"
    )
    if not _alike(whole.output, row.output):
        raise Unfit(told.format("output"))
    for one, other in zip(whole.sums, row.sums, strict=True):
        if not _alike(one[0], other[0]) or not _alike(one[1], other[1]):
            raise Unfit(told.format("losses"))
    for name, buffer in whole.buffers.items():
        if not _alike(buffer, row.buffers[name]):
            raise Unfit(told.format(f"buffers ({name})"))
    for name, gradient in whole.gradients.items():
        if not _alike(gradient, row.gradients[name]):
            raise Unfit(told.format(f"gradients (of {name})"))


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.is_meta or torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def _refuse_cutting(workload: CustomWorkload, module: nn.Module) -> None:
    """Where the last microbatch of an evaluation is smaller it is filled up."""
    size = workload.settings.microbatch
    num_samples = min(workload.settings.eval_samples, workload.num_held_out)
    if not workload.settings.eval_every or num_samples % size == 0:
        return
    batch = _placed(module, workload.example(num_samples % size, held_out=True))
    inputs = inputs_of(workload.loss_in(False), batch.value, False)
    *_, own = through(module, workload.shape().layers, inputs)
    *_, more = through(module, workload.shape().layers, filled_up(inputs, len(workload.flow[0])))
    if not _alike(own, cut_back(more, batch.num_held, size)):
        raise Unfit(
            f"the output of a sample depends on others of its microbatch, and {num_samples} "
            f"held-out samples are no multiple of {size}: --set eval_samples="
            f"{max(num_samples // size * size, size)}"
        )
