"""Worker memory: the peak bytes of one worker in a step, by what they are for.

`fsdp` shards the optimizer state from zero=1 on, the gradients (as large as trained parameters)
from 2 on, the parameters at 3; below 3 a worker holds whole parameters. `pp x tp` divides all.
`pp x ep` divides experts, which are sharded over the rest of `fsdp x cp x tp`. For all other
tensors `cp` replicates (Rajbhandari et al., ZeRO, 2020, section 5). Where the memory facts give the
bytes of each pipeline layer, those of the fullest stage count, and `tp` divides what it cuts.

Activations are those of a trial (`PassMemory`), divided by `cp`. A step has two moments that may be
its peak: the begin of a backward, with all activations, and its end, with all gradients. If a
worker computes several passes, gradients of earlier ones are there at the begin, too. In a
pipeline, a rank keeps the activations of as many microbatches as its schedule has in flight.
Without facts only state and gradients count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import add
from typing import NamedTuple

from elastic.geometry.layout import Layout
from elastic.geometry.pipeline_stages import pipeline_ranks
from elastic.geometry.training_job import Job, PassMemory
from elastic.geometry.zero import divides

NUM_GATHERED = 2
"""Stage 3: the block that is computed and the next one."""
NUM_IN_FLIGHT = 2
"""Collectives of gradient buckets that run at the same time."""
LEAST_BUCKET_BYTES = 4 << 20
"""Smaller buckets of gradients are merged up to this size."""
ROUNDING = 1e-6
"""Of sums of fractions of bytes."""


class WorkerMemory(NamedTuple):
    """Bytes of one worker at the peak of a step.

    `copies` are whole parameters in the dtype of the computation beside the stored ones; `gathered`
    are parameters that stage 3 gathers for a block; `communication` are the buffers of collectives.
    """

    parameters: int = 0
    copies: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    activations: int = 0
    communication: int = 0

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def state(self) -> int:
        """The bytes that do not depend on activations: parameters, gradients, optimizer state."""
        return self.parameters + self.copies + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class _Part:
    """Whole bytes of a kind of tensors on one pipeline rank, and how many ranks shard them."""

    parameters: float
    gradients: float
    copies: float
    optimizer: float
    num_shards: int


def worker_memory(job: Job, layout: Layout) -> WorkerMemory:
    """The peak of the worker that needs most."""
    ranks = range(layout.pp) if job.memory.layers else range(1)
    peaks = [_memory_of_rank(job, layout, pp_rank) for pp_rank in ranks]
    return max(peaks, key=lambda peak: peak.total)


def _memory_of_rank(job: Job, layout: Layout, pp_rank: int) -> WorkerMemory:
    facts = job.memory
    parts = list(_parts(job, layout, pp_rank))
    state = WorkerMemory()
    for part in parts:
        state = _sum(state, _resident(job, layout, part))
    if not facts.passes:
        return state
    state = state._replace(gathered=_gathered(job, layout, parts))
    begin, end = _activations(job, layout, pp_rank)
    at_begin = state._replace(activations=begin)
    rounds = _num_rounds(job, layout)
    if rounds <= _num_in_flight(facts.schedule, layout, pp_rank, rounds):
        at_begin = at_begin._replace(gradients=0)
    moments = [at_begin, *_ends(job, layout, state._replace(activations=end))]
    return max(moments, key=lambda peak: peak.total)


def _ends(job: Job, layout: Layout, at_end: WorkerMemory) -> Iterator[WorkerMemory]:
    """The moments at the end of a backward in which gradients are reduced. Whole gradients are
    reduced in large buckets, when only the first block still has its activations."""
    reduced = _reduced(job, layout)
    if divides(layout.zero, "optimizer") and layout.fsdp > 1:
        yield at_end._replace(communication=reduced)
        return
    yield at_end
    trial = pass_memory(job.memory.passes, layout.tp)
    one = _ceil(trial.blocks_bytes / layout.cp / max(1, job.memory.num_blocks))
    yield at_end._replace(activations=min(one, at_end.activations), communication=reduced)


def _parts(job: Job, layout: Layout, pp_rank: int) -> Iterator[_Part]:
    """The dense tensors of a pipeline rank, and its experts."""
    facts = job.memory
    num_params = job.param_bytes - job.expert_param_bytes
    share = (facts.gradient_bytes or job.param_bytes) / job.param_bytes if job.param_bytes else 1.0
    copies = facts.copy_bytes / job.param_bytes if job.param_bytes else 0.0
    state = job.state_bytes - job.expert_state_bytes
    if facts.layers:
        params = _dense_params(job, layout, pp_rank)
        optimizer = (state - num_params) * (params / num_params if num_params else 0.0)
    else:
        num_cuts = layout.pp * layout.tp
        params, optimizer = num_params / num_cuts, (state - num_params) / num_cuts
    yield _Part(params, params * share, params * copies, optimizer, layout.fsdp)
    if job.expert_state_bytes:
        num_cuts = layout.pp * layout.ep
        params = job.expert_param_bytes / num_cuts
        optimizer = (job.expert_state_bytes - job.expert_param_bytes) / num_cuts
        num_shards = layout.fsdp * layout.cp * layout.tp // layout.ep
        yield _Part(params, params * share, params * copies, optimizer, num_shards)


def _dense_params(job: Job, layout: Layout, pp_rank: int) -> float:
    """The bytes of a pipeline rank's whole dense parameters, after `tp`."""
    layers = job.memory.layers
    costs = job.layer_costs or (1,) * len(layers)
    own = _layers_of(costs, layout.pp, layout.vp, pp_rank)
    everywhere = job.param_bytes - job.expert_param_bytes - sum(map(sum, layers))
    parts = [layers[number] for number in own]
    if len(layers) - 1 in own and 0 not in own:
        parts.append(job.memory.tied)
    return everywhere + sum(cut / layout.tp + whole for cut, whole in parts)


@lru_cache(maxsize=1024)
def _layers_of(costs: tuple[int, ...], pp: int, vp: int, pp_rank: int) -> tuple[int, ...]:
    ranks = pipeline_ranks(costs, pp, vp)
    return tuple(number for number, rank in enumerate(ranks) if rank == pp_rank)


def _is_gathered(layout: Layout, part: _Part) -> bool:
    """Whether these parameters are shards that a step gathers, as at stage 3."""
    return divides(layout.zero, "parameters") and part.num_shards > 1


def _resident(job: Job, layout: Layout, part: _Part) -> WorkerMemory:
    """What stays from one step to the next, and the gradients of all passes."""
    facts, shards = job.memory, part.num_shards
    is_gathered = _is_gathered(layout, part)
    keeps_whole = layout.pp > 1 or (facts.sums_whole and _num_rounds(job, layout) > 1)
    cuts_gradients = divides(layout.zero, "gradients") and not (is_gathered and keeps_whole)
    gradients = part.gradients / (shards if cuts_gradients else 1)
    optimizer = part.optimizer / (shards if divides(layout.zero, "optimizer") else 1)
    if is_gathered and layout.pp == 1:
        parameters, copies = part.parameters / shards, 0.0
    elif is_gathered:  # a pipeline keeps them gathered
        parameters = part.parameters / shards if facts.passes else 0.0
        copies = part.copies or part.parameters
    else:
        has_own = part.copies and divides(layout.zero, "optimizer")
        parameters, copies = part.parameters / (shards if has_own else 1), part.copies
    if facts.offloads:
        optimizer = 0.0
        if is_gathered:
            parameters = gradients = 0.0
    sizes = (parameters, copies, gradients, optimizer)
    ends = [_ceil(end) for end in accumulate(sizes)]  # so that only the sum is rounded
    return WorkerMemory(*(end - begin for begin, end in pairwise((0, *ends))))


def _gathered(job: Job, layout: Layout, parts: list[_Part]) -> int:
    """The parameters of blocks that a step has gathered at once, and of those outside of blocks."""
    gathered = [part for part in parts if _is_gathered(layout, part)]
    if not gathered or layout.pp > 1:
        return 0
    facts = job.memory
    ratio = facts.copy_bytes / job.param_bytes if facts.copy_bytes else 1.0
    whole = sum(part.parameters for part in gathered) * ratio
    if facts.keeps_gathered:
        return _ceil(whole)
    blocks = facts.root_bytes + NUM_GATHERED * facts.block_bytes
    return _ceil(min(whole, blocks * ratio / layout.tp))


def _reduced(job: Job, layout: Layout) -> int:
    """Buffers of collectives for the gradients, at the end of a backward."""
    facts = job.memory
    if layout.num_data_ranks * layout.cp == 1:
        return 0
    trained = (facts.gradient_bytes or job.param_bytes) / layout.tp / layout.pp
    block = min(trained, facts.block_bytes / layout.tp)
    bucket = min(trained, max(block, LEAST_BUCKET_BYTES))
    if layout.fsdp == 1 or layout.zero == 0:
        return _ceil(bucket)
    share = 1 + 1 / layout.fsdp
    if divides(layout.zero, "parameters"):
        return _ceil(block * share)
    if divides(layout.zero, "gradients"):
        return _ceil(min(trained, NUM_IN_FLIGHT * block) * share + block)
    return _ceil(min(trained, NUM_IN_FLIGHT * bucket) * share + trained / layout.fsdp)


def _activations(job: Job, layout: Layout, pp_rank: int) -> tuple[int, int]:
    """A rank's activations at the begin and at the end of its backward."""
    facts = job.memory
    trial = pass_memory(facts.passes, layout.tp)
    blocks = trial.blocks_bytes / layout.cp
    outer = trial.outer_bytes / layout.cp
    loss, block = trial.loss_bytes / layout.cp, trial.block_bytes / layout.cp
    last = trial.last_bytes / layout.cp
    if layout.pp == 1:
        return _ceil(blocks + outer + max(loss, block)), _ceil(last)
    share = _block_share(job, layout, pp_rank)
    rounds = _num_rounds(job, layout)
    in_flight = _num_in_flight(facts.schedule, layout, pp_rank, rounds)
    hidden = 2 * layout.vp * job.activation_bytes / (layout.cp * layout.tp)
    is_last = pp_rank == layout.pp - 1
    kept = in_flight * (blocks * share + hidden)
    if not is_last:
        return _ceil(kept + block), _ceil(last)
    outputs = rounds * facts.output_bytes / (layout.cp * layout.tp)
    return (
        _ceil(kept + in_flight * outer + max(loss, block) + outputs),
        _ceil(last + 2 * outputs),
    )


def pass_memory(passes: tuple[PassMemory, ...], tp: int) -> PassMemory:
    """The trial of this degree of `tp`, or that of the next lower one, divided."""
    trial = max((p for p in passes if p.tp <= tp), key=lambda p: p.tp, default=passes[0])
    if trial.tp == tp:
        return trial
    return PassMemory(
        tp,
        blocks_bytes=trial.blocks_bytes * trial.tp // tp,
        outer_bytes=trial.outer_bytes * trial.tp // tp,
        loss_bytes=trial.loss_bytes * trial.tp // tp,
        block_bytes=trial.block_bytes * trial.tp // tp,
        last_bytes=trial.last_bytes * trial.tp // tp,
        num_operations=trial.num_operations,
    )


def _block_share(job: Job, layout: Layout, pp_rank: int) -> float:
    """The share of all blocks that lies on a pipeline rank."""
    facts, layers = job.memory, job.memory.layers
    costs = job.layer_costs or (1,) * len(layers)
    own = _layers_of(costs, layout.pp, layout.vp, pp_rank)
    num_outer = len(layers) - facts.num_blocks
    if num_outer not in (0, 1, 2):
        return len(own) / len(layers)
    first = 1 if num_outer == 2 else 0
    last = len(layers) - (1 if num_outer else 0)
    return sum(first <= number < last for number in own) / max(1, facts.num_blocks)


def _num_rounds(job: Job, layout: Layout) -> int:
    return max(layout.pp, -(-job.num_microbatches // layout.num_data_ranks))


def _num_in_flight(schedule: str, layout: Layout, pp_rank: int, rounds: int) -> float:
    """The microbatches whose activations a pipeline rank keeps at once."""
    if layout.pp == 1:
        return 1
    if schedule == "gpipe":
        return rounds
    if schedule == "1f1b":
        return min(rounds, layout.pp - pp_rank)
    warm_up = (layout.pp - pp_rank - 1) * 2 + (layout.vp - 1) * layout.pp + 1
    return min(rounds, warm_up / layout.vp)


def _sum(left: WorkerMemory, right: WorkerMemory) -> WorkerMemory:
    return WorkerMemory(*map(add, left, right))


def _ceil(size: float) -> int:
    return -int(-(size - ROUNDING) // 1)
