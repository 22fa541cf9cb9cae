"""Trial of a recipe's plan before a run: its module must run with the layers of one `tp` rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from pipelines.errors import UserError, first_line
from pipelines.training.custom.merge_trial import (
    MAX_PARAMETERS,
    NOISE,
    MergeCandidate,
    draws_at_random,
    pass_draws,
)
from pipelines.training.custom.module_calls import BodyTrial, Convert
from pipelines.training.custom.modules.custom_module import (
    build_on_host,
    count_parameters,
    seeded,
)
from pipelines.training.custom.modules.custom_pipeline import CustomBatch
from pipelines.training.custom.modules.loss_sums import loss_sums_of
from pipelines.training.tensor.draw_trial import find_draws, for_trial
from pipelines.training.tensor.sharded_draws import Unknown
from pipelines.training.tensor.value_trial import Untried, refuse_other_values
from pipelines.training.workload.seeds import keyed_generator
from pipelines.training.workload.state import in_stored_dtype, stored_dtype
from pipelines.training.workload.trees import mapped
from pipelines.training.workload.workload import ModelShape

NUM_SAMPLES = 2


class TensorCandidate(MergeCandidate, Protocol):
    """A custom workload, as the trial sees it."""

    body: BodyTrial | None
    """Of a script; None: a recipe, which has a loss."""

    def example(self, num_samples: int) -> CustomBatch: ...


def why_no_tensor_parallelism(candidate: TensorCandidate, shape: ModelShape) -> str | None:
    """The reason why the module cannot be trained under `tp`, or None.

    It runs twice on the meta device, where only shapes are known; a module that does not run there
    is refused if it draws random numbers. Then it runs with values, whole and on virtual ranks.
    """
    settings = candidate.settings
    if candidate.body is not None and not candidate.body.calls:
        _say("tp was not tried out: the body of the script's step runs first on the workers")
        return None
    divides = shape.limits.tp_divides or 2
    num_tp = next((tp for tp in range(2, divides + 1) if divides % tp == 0), None)
    if num_tp is None:
        return None
    try:
        with seeded(settings.seed):
            dtype = getattr(torch, settings.dtype)
            whole, cut = (for_trial(candidate.module(), dtype) for _ in range(2))
            loss = loss_of(candidate, lambda tensor: _in_dtype(tensor, dtype).to("meta"))
            draws = find_draws(whole, cut, shape, num_tp, loss)
    except Unknown as unknown:
        if _draws(candidate):
            return str(unknown)
        draws = []
    except UserError as error:
        return str(error)
    if any(draws) and settings.compile:
        return "dropout of activations that tp shards needs compile=false"
    return _why_other_values(candidate, shape, num_tp)


def _why_other_values(candidate: TensorCandidate, shape: ModelShape, num_tp: int) -> str | None:
    """The reason why sharded layers compute something else than the whole module, or None.

    Without a trial with values one line says so.
    """
    settings = candidate.settings
    num_parameters = count_parameters(candidate.module())
    try:
        if num_parameters > MAX_PARAMETERS:
            raise Untried(f"the module has {num_parameters:,} parameters, over {MAX_PARAMETERS:,}")
        with seeded(settings.seed):
            modules = [_with_noise(candidate) for _ in range(1 + num_tp)]
            refuse_other_values(modules, shape, _loss_of_values(candidate))
            if candidate.body is not None:
                _refuse_outside(modules[0], candidate.body)
    except UserError as error:
        return str(error)
    except Exception as error:  # a module that needs a GPU, for example
        kind = "" if isinstance(error, Untried) else f"{type(error).__name__}: "
        reason = kind + first_line(error)
        _say(f"tp was tried out with shapes, not with values: {reason}")
    return None


def loss_of(candidate: TensorCandidate, convert: Convert) -> Callable[[nn.Module], Tensor]:
    """The loss of a few samples, whose tensors `convert` makes; of a script that of its calls."""
    if (body := candidate.body) is not None:
        return lambda module: body.repeat(module, convert)
    batch = candidate.example(min(NUM_SAMPLES, candidate.settings.microbatch))

    def loss(module: nn.Module) -> Tensor:
        losses = candidate.recipe.loss(module, mapped(convert, batch.value))
        return loss_sums_of(losses, batch.num_held).loss

    return loss


def _loss_of_values(candidate: TensorCandidate) -> Callable[[nn.Module], Tensor]:
    dtype = stored_dtype(candidate.settings)
    return loss_of(candidate, lambda tensor: _in_dtype(tensor.clone(), dtype))


def _draws(candidate: TensorCandidate) -> bool:
    """Whether a pass draws random numbers, or may."""
    if candidate.body is None:
        return draws_at_random(candidate)

    def prepare() -> Callable[[], object]:
        loss, module = _loss_of_values(candidate), _with_noise(candidate)
        return lambda: loss(module)

    return pass_draws(candidate, prepare)


def _refuse_outside(whole: nn.Module, body: BodyTrial) -> None:
    """Raise `UserError` for a parameter that the body itself uses, as nothing shards it there."""
    named = whole.named_parameters()
    inside = {name for name, parameter in named if parameter.grad is not None}
    if outside := sorted(body.trained - inside):
        raise UserError(
            f"tp: the body of the step uses {outside[0]} itself: use it in the forward of the "
            "module that has it"
        )


def _in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _say(line: str) -> None:
    print(f"elastic: {line}", file=sys.stderr)


def _with_noise(candidate: TensorCandidate) -> nn.Module:
    """The module on the host; each time with the same noise on its parameters, since a parameter of
    value 0 would hide differences."""
    settings = candidate.settings
    module = build_on_host(candidate.recipe.model, settings.seed)
    in_stored_dtype(module, settings).train()
    generator = keyed_generator("noise", settings.seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(NOISE * noise)
    return module
