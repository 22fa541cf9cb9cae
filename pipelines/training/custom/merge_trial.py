"""Trial of merged passes before a run: two microbatches in one pass must equal two passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from pipelines.errors import UserError, first_line
from pipelines.reading.pass_reader import seed_host
from pipelines.settings import TrainSettings
from pipelines.settings.recipe import Recipe
from pipelines.training.attention.cut_sequences import refuse_other_sums
from pipelines.training.custom.modules.block_flow import in_dtypes
from pipelines.training.custom.modules.custom_module import (
    build_on_host,
    count_parameters,
    seeded,
)
from pipelines.training.custom.modules.custom_pipeline import CustomBatch
from pipelines.training.custom.modules.microbatch_draws import MicrobatchDraws
from pipelines.training.workload.parallel_groups import ALONE, ParallelGroups
from pipelines.training.workload.seeds import forward_seed, generator_states
from pipelines.training.workload.state import buffers
from pipelines.training.workload.trees import mapped
from pipelines.training.workload.workload import LossSums, Metric, at_least_float32

MAX_PARAMETERS = 20_000_000
"""A larger module is not tried out: each worker would build it on its host."""
CPU = torch.device("cpu")
NOISE = 0.05
"""Scale of the noise added to parameters: a parameter of value 0 would hide differences."""


SEEDS = 1, 2
"""The seeds of the two microbatches."""
DROPOUT_LAYERS = (
    nn.AlphaDropout,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.FeatureAlphaDropout,
)

T = TypeVar("T")


class MergeCandidate(Protocol):
    """A custom workload, as the trial sees it."""

    recipe: Recipe
    settings: TrainSettings

    def module(self) -> nn.Module: ...

    def kinds(self, training: bool) -> Sequence[Metric]: ...

    def first(self, num_samples: int) -> list[int]: ...

    def items(self, samples: Sequence[int]) -> list[Any]: ...

    def batch_of(self, items: list[Any]) -> CustomBatch: ...

    def feed(
        self, batch: CustomBatch, device: torch.device, parallel: ParallelGroups, *seeds: int
    ) -> CustomBatch: ...


class _Unmergeable(Exception):
    """The reason why merged microbatches are another computation."""


class _Pass(NamedTuple):
    sums: LossSums
    gradients: dict[str, Tensor]


class Merging(NamedTuple):
    """Whether a pass may have several of a recipe's microbatches."""

    why_not: str | None
    divides_draws: bool = False
    """Whether each microbatch's draws must be made apart; see `MicrobatchDraws`."""


def try_merging(candidate: MergeCandidate, max_parameters: int = MAX_PARAMETERS) -> Merging:
    """Find out whether a pass may have several of the recipe's microbatches."""
    num_parameters = count_parameters(candidate.module())
    if num_parameters > max_parameters:
        return Merging(
            f"the module has {num_parameters:,} parameters, and a trial of merged microbatches is "
            f"run up to {max_parameters:,}"
        )
    try:
        with seeded(candidate.settings.seed):
            return _try_out(candidate)
    except _Unmergeable as unmergeable:
        return Merging(str(unmergeable))
    except Exception as error:
        reason = first_line(error)
        return Merging(f"the trial of merged microbatches failed: {type(error).__name__}: {reason}")


def draws_at_random(candidate: MergeCandidate, max_parameters: int = MAX_PARAMETERS) -> bool:
    """Whether a training pass of the recipe draws random numbers; see `pass_draws`."""

    def prepare() -> Callable[[], object]:
        size = min(2, candidate.settings.microbatch)
        batch = candidate.batch_of(candidate.items(candidate.first(size)))
        module = _module(candidate)
        return lambda: candidate.recipe.loss(module, candidate.feed(batch, CPU, ALONE).value)

    return pass_draws(candidate, prepare, max_parameters)


def pass_draws(
    candidate: MergeCandidate,
    prepare: Callable[[], Callable[[], object]],
    max_parameters: int = MAX_PARAMETERS,
) -> bool:
    """Whether the pass that `prepare` returns draws random numbers; also if that is unknown, as the
    module is too large to be tried out, or fails."""
    if count_parameters(candidate.module()) > max_parameters:
        return True
    try:
        with seeded(candidate.settings.seed):
            run = prepare()
            states = generator_states(CPU)
            run()
            return generator_states(CPU) != states
    except Exception:  # what is wrong with it, the run reports
        return True


def why_no_context_parallelism(candidate: MergeCandidate) -> str | None:
    """The reason why `cp` cannot cut the recipe's sequences, or None."""
    recipe, settings = candidate.recipe, candidate.settings
    if recipe.pipeline:
        return "the blocks of a pipeline get whole sequences: leave out the recipe's pipeline"
    if draws_at_random(candidate):
        return (
            "a pass draws random numbers, as dropout does, or could not be tried out: each rank "
            "would draw others"
        )
    try:
        with seeded(settings.seed):
            batch = _batch_of(candidate, candidate.items(candidate.first(settings.microbatch)))
            refuse_other_sums(_module(candidate), batch.value, recipe.sequence, recipe.loss)
    except UserError as error:
        return str(error).removeprefix("cp: ")
    except Exception as error:
        reason = first_line(error)
        return f"the module fails with half of a sequence: {type(error).__name__}: {reason}"
    return None


def _try_out(candidate: MergeCandidate) -> Merging:
    size = min(2, candidate.settings.microbatch)
    items = candidate.items(candidate.first(2 * size))
    merged, first, second = (
        _batch_of(candidate, chosen) for chosen in (items, items[:size], items[size:])
    )
    module = _module(candidate)
    _refuse_mean(candidate.recipe.loss(module, merged.value), 2 * size)
    draws = MicrobatchDraws(SEEDS, CPU)
    with draws if _may_divide_draws(candidate) else nullcontext():
        together = _drawing_nothing(
            "a pass of the module or loss", partial(_run, candidate, module, merged)
        )
    apart = []
    for seed, batch in zip(SEEDS, (first, second), strict=True):
        seed_host(forward_seed(seed))
        apart.append(_run(candidate, module, batch))
    if not _alike(together.sums.num_tokens, sum(part.sums.num_tokens for part in apart)):
        raise _Unmergeable("the number of losses of a sample depends on its microbatch")
    if not _alike(together.sums.loss, sum(part.sums.loss for part in apart)):
        raise _Unmergeable("the loss of a sample depends on others of its microbatch")
    for name, gradient in together.gradients.items():
        if not _alike(gradient, sum(part.gradients.get(name, 0.0) for part in apart)):
            raise _Unmergeable(
                f"the gradient of {name} depends on which samples share a microbatch"
            )
    return Merging(None, draws.has_divided)


def _may_divide_draws(candidate: MergeCandidate) -> bool:
    """Whether draws for a microbatch have the same shapes in any pass, and are not repeated in
    backward. A custom `collate` may pad samples to the longest of a pass."""
    settings = candidate.settings
    is_repeated = settings.activation_checkpointing != "none" or settings.compile
    return candidate.recipe.collate is default_collate and not is_repeated


def _batch_of(candidate: MergeCandidate, items: list[Any]) -> CustomBatch:
    batch = _drawing_nothing("collate", partial(candidate.batch_of, items))
    fed = candidate.feed(batch, CPU, ALONE)
    return fed._replace(value=mapped(at_least_float32, fed.value))


def _module(candidate: MergeCandidate) -> nn.Module:
    module = in_dtypes(
        build_on_host(candidate.recipe.model, candidate.settings.seed), candidate.recipe
    )
    if candidate.settings.dtype == "bfloat16":
        module.float()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.add_(NOISE * torch.randn_like(parameter))
    for layer in module.modules():
        if isinstance(layer, DROPOUT_LAYERS) and layer.p:
            layer.p = 0.5  # masks of few elements with a small probability may be equal by chance
    return module.train()


def _run(candidate: MergeCandidate, module: nn.Module, batch: CustomBatch) -> _Pass:
    before = {name: buffer.clone() for name, buffer in buffers(module)}
    [loss] = candidate.kinds(training=True)
    module.zero_grad()
    sums = loss(module, batch, ALONE)
    for name, buffer in buffers(module):
        if not torch.equal(buffer, before[name]):
            raise _Unmergeable(f"a pass updates buffer {name}, as batch normalization does")
    sums.loss.backward()
    named = module.named_parameters()
    return _Pass(
        LossSums(sums.loss.detach(), sums.num_tokens),
        {name: p.grad.clone() for name, p in named if p.grad is not None},
    )


def _refuse_mean(losses: Any, num_samples: int) -> None:
    if isinstance(losses, Tensor) and losses.shape != (num_samples,):
        raise _Unmergeable(
            "the loss returns a mean, which may be one over tokens; return one loss for each "
            "sample, or a pair (sum, count)"
        )


def _drawing_nothing(what: str, call: Callable[[], T]) -> T:
    states = generator_states(CPU)
    result = call()
    if generator_states(CPU) != states:
        raise _Unmergeable(f"{what} draws random numbers, as dropout does")
    return result


def _alike(first: Any, second: Any) -> bool:
    return torch.allclose(
        torch.as_tensor(first, dtype=torch.float64),
        torch.as_tensor(second, dtype=torch.float64),
        rtol=1e-4,
        atol=1e-6,
        equal_nan=True,
    )
