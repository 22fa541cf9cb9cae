"""A transformer's state for `reshard.py`, and the lower bound of the bytes that a reshard moves.

The bound shares only the assignment of layers to stages with the product: torch itself chunks the
indices of each dim.
"""

from __future__ import annotations

from itertools import count
from math import prod

import torch

from elastic.geometry.layout import Layout
from elastic.geometry.pipeline_stages import deal_layers
from elastic.geometry.tensor_specs import TensorSpec
from elastic.reshard.reshard_plan import ReshardPlan
from pipelines.data.synthetic import RandomWindows
from pipelines.run.recipes import tiny
from pipelines.settings import ExpertsSettings, TransformerSettings
from pipelines.training.models.language_model import LanguageModelWorkload
from pipelines.training.workload.state import state_specs

MODEL = TransformerSettings(
    vocab_size=4096, dim=512, num_heads=8, num_kv_heads=8, hidden_dim=4096, num_layers=1
)
EXPERTS = ExpertsSettings(num_experts=8, hidden_dim=1024)
MIN_BLOCKS = 2


def transformer_state(megabytes: int, has_experts: bool) -> tuple[TensorSpec, ...]:
    """The specs of the shallowest transformer with at least `megabytes` of parameters and
    moments."""
    model = MODEL.model_copy(update={"experts": EXPERTS if has_experts else None})
    for num_layers in count(MIN_BLOCKS):
        model = model.model_copy(update={"num_layers": num_layers})
        samples = RandomWindows("train", 64, vocab_size=model.vocab_size)
        specs = state_specs(LanguageModelWorkload(model, samples, None), tiny())
        if sum(spec.num_bytes for spec in specs) >= megabytes * 2**20:
            return specs
    raise AssertionError("unreachable: count() does not end")


def lower_bound_bytes(specs: tuple[TensorSpec, ...], reshard: ReshardPlan) -> int:
    """The bytes of all new regions minus those that their workers already hold."""
    assert reshard.old is not None
    total_bytes = 0
    for spec in specs:
        for worker in reshard.new.members:
            new_layout, new_rank = reshard.new.layout, reshard.new.world_rank(worker)
            new_indices = _indices(spec, new_layout, new_rank)
            old_indices = [torch.empty(0, dtype=torch.int64)] * len(new_indices)
            if worker in reshard.holders:
                old_indices = _indices(spec, reshard.old.layout, reshard.old.world_rank(worker))
            num_common = [
                int(torch.isin(a, b).sum()) for a, b in zip(new_indices, old_indices, strict=True)
            ]
            total_bytes += (prod(map(len, new_indices)) - prod(num_common)) * spec.itemsize_bytes
    return total_bytes


def _indices(spec: TensorSpec, layout: Layout, world_rank: int) -> list[torch.Tensor]:
    """For each dim the indices that a rank holds of a parameter or its optimizer state, with
    zero=3; a scalar counts as one dim."""
    pp, _, fsdp, cp, tp = layout.coordinates(world_rank)
    indices = [torch.arange(size) for size in spec.shape or (1,)]
    if spec.layer is not None and layout.pp > 1:
        stages = deal_layers(spec.layer_costs, layout.pp * layout.vp)[pp :: layout.pp]
        if not any(spec.layer in stage for stage in stages):
            return [torch.empty(0, dtype=torch.int64) for _ in indices]
    inner, outer = (tp, layout.tp, spec.tp_dim), (fsdp, layout.fsdp, spec.fsdp_dim)
    if spec.ep_dim is not None:
        position = (fsdp * layout.cp + cp) * layout.tp + tp
        num_groups = layout.fsdp * layout.cp * layout.tp // layout.ep
        inner = (position % layout.ep, layout.ep, spec.ep_dim)
        outer = (position // layout.ep, num_groups, spec.fsdp_dim)
    for index, degree, dim in (inner, outer):
        if dim is not None:
            chunks = indices[dim].chunk(degree)
            indices[dim] = chunks[index] if index < len(chunks) else indices[dim][:0]
    return indices
