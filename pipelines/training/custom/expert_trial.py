"""Trial before a run of the experts that a recipe names: dealt to ranks, they compute the same."""

from __future__ import annotations

import sys
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from pipelines.errors import first_line
from pipelines.training.custom.merge_trial import MAX_PARAMETERS
from pipelines.training.custom.modules.block_flow import in_dtypes
from pipelines.training.custom.modules.custom_module import (
    build_on_host,
    count_parameters,
    seeded,
)
from pipelines.training.custom.tensor_trial import TensorCandidate, loss_of
from pipelines.training.models.expert_parallel import (
    compute_rows,
    keep_part,
    named_experts,
    number_of,
)
from pipelines.training.workload.workload import ModelShape


def why_no_expert_parallelism(candidate: TensorCandidate, shape: ModelShape) -> str | None:
    """The reason why the experts cannot be dealt to the ranks of `ep`, or None.

    The outputs of experts in parts must equal those of all together.
    """
    recipe, settings = candidate.recipe, candidate.settings
    if candidate.body is not None and not candidate.body.calls:
        _say_untried("the body of the script's step runs first on the workers")
        return None
    num_parameters = count_parameters(candidate.module())
    if num_parameters > MAX_PARAMETERS:
        _say_untried(f"the module has {num_parameters:,} parameters, over {MAX_PARAMETERS:,}")
        return None
    module = in_dtypes(build_on_host(recipe.model, settings.seed), recipe)
    experts = dict(named_experts(module, shape))
    calls: dict[str, tuple[Any, Tensor]] = {}
    for name, part in experts.items():
        part.register_forward_hook(
            lambda part, inputs, output, name=name: calls.update({name: (inputs, output)})
        )
    try:
        with seeded(settings.seed), torch.no_grad():
            loss_of(candidate, lambda tensor: tensor.clone())(module)
    except Exception as error:  # a module that needs a GPU, for example
        _say_untried(f"{type(error).__name__}: {first_line(error)}")
        return None
    try:
        with seeded(settings.seed), torch.no_grad():
            for name, (inputs, output) in calls.items():
                if not _alike(_outputs_in_parts(experts[name], *inputs), output):
                    return f"the outputs of {name} in parts are not those of all its experts"
    except Exception as error:  # the module's own code raises any type
        return (
            "experts must be called with tokens (any, dim), chosen experts (any, k) and weights "
            f"(any, k): {type(error).__name__}: {first_line(error)}"
        )
    unused = [name for name in experts if name not in calls]
    return f"a pass does not call {unused[0]}" if unused else None


def _say_untried(why: str) -> None:
    print(f"elastic: experts were not tried out in parts: {why}", file=sys.stderr)


def _outputs_in_parts(
    experts: nn.Module, tokens: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """The outputs of experts that are computed in equal parts, as the ranks of `ep` do."""
    num_experts = number_of(experts)
    num_parts = next(n for n in range(2, num_experts + 1) if num_experts % n == 0)
    size = num_experts // num_parts
    outputs = tokens.new_zeros(*chosen.shape, tokens.shape[-1])
    for part in range(num_parts):
        alone = deepcopy(experts)
        keep_part(alone, part, num_parts)
        for number in range(size):
            rows, places = (chosen == part * size + number).nonzero(as_tuple=True)
            counts = torch.zeros(size, dtype=torch.int64)
            counts[number] = len(rows)
            outputs[rows, places] = compute_rows(alone.forward, tokens[rows], counts, len(rows))
    return (outputs * weights[..., None]).sum(1).to(tokens.dtype)


def _alike(first: Tensor, second: Tensor) -> bool:
    rtol = 1e-4 if first.dtype in (torch.float32, torch.float64) else 3e-2
    return first.shape == second.shape and torch.allclose(first, second, rtol=rtol, atol=rtol / 100)
