"""The axes over which a recipe cannot be trained: what its shape refuses, and what trials find."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from pipelines.training.custom.expert_trial import why_no_expert_parallelism
from pipelines.training.custom.merge_trial import why_no_context_parallelism
from pipelines.training.custom.optimizer_checks import NOT_CUT
from pipelines.training.custom.pipeline_trial import PipelineCandidate, why_no_pipeline
from pipelines.training.custom.tensor_trial import TensorCandidate, why_no_tensor_parallelism
from pipelines.training.workload.workload import ModelShape


class AxesCandidate(PipelineCandidate, TensorCandidate, Protocol):
    """A custom workload, as all trials see it."""

    @property
    def whole_parameters(self) -> Collection[str]: ...


def refused_axes(
    candidate: AxesCandidate, shape: ModelShape, why_not_split: str | None
) -> tuple[tuple[str, str], ...]:
    """Pairs of axis and reason. `why_not_split` is the reason why the optimizer cannot step a part
    of the parameters alone."""
    refused = dict(shape.limits.refused)
    if why_not_split:
        refused |= dict.fromkeys(("fsdp", "tp", "ep"), why_not_split)
    elif candidate.whole_parameters:
        refused |= dict.fromkeys(("tp", "ep"), NOT_CUT)
    trials: dict[str, Callable[[], str | None]] = {
        "tp": lambda: why_no_tensor_parallelism(candidate, shape),
        "ep": lambda: why_no_expert_parallelism(candidate, shape),
        "cp": lambda: _why_no_context_parallelism(candidate),
        "pp": lambda: why_no_pipeline(candidate) or why_not_split,
    }
    for axis, why_not in trials.items():
        if axis not in refused and (reason := why_not()):
            refused[axis] = reason
    return tuple(refused.items())


def _why_no_context_parallelism(candidate: AxesCandidate) -> str | None:
    settings, body = candidate.settings, candidate.body
    if settings.activation_checkpointing != "none" or settings.compile:
        return "the attention of a recipe needs activation_checkpointing=none and compile=false"
    return why_no_context_parallelism(candidate) if body is None else body.why_no_cp
