"""Which layout to train under: the wish at full strength, else the best that the workers allow.

The model axes (pp, cp, tp, ep, zero) are those of the wish. For the data axes every `fsdp` is
weighed with the most replicas that it leaves room for; fewer replicas could only lose. Among
those that fit the memory, in this order:

1. shortest step, in units of one microbatch on one stage: `ceil(num_microbatches / (dp x
   fsdp)) + pp - 1` (the last term is the bubble of 1F1B, Narayanan et al., 2021); whatever
   is within 5 % of the best counts as equal;
2. more replicas;
3. fewer bytes moved, estimated by how much of a worker's old shard is not in its new one:
   nothing for the `fsdp` of before, else `1 - min(old, new) / max(old, new)`;
4. the smaller (dp, fsdp).

There are never more data ranks than microbatches a step. While no snapshot covers the state,
one replica alone is taken only where no two fit: a single loss would cost steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from elastic.infeasible import Infeasible
from elastic.layout import Layout
from elastic.limits import Limits

STEP_TOLERANCE_PERCENT = 5


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asks for: the model axes for good, the data axes at full strength.

    With neither `dp` nor `fsdp` the data axes are planned from the start; one of them alone
    means that the other is 1. `max_workers=None`: as many as there are.
    """

    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int = 3
    vp: int = 1
    dp: int | None = None
    fsdp: int | None = None
    max_workers: int | None = None

    @classmethod
    def parse(cls, text: str, max_workers: int | None = None) -> Wish:
        """Read `dp=2,tp=2`; an empty text wishes nothing. Raises `InvalidLayout`."""
        layout = Layout.parse(text) if text.strip() else Layout()
        told = {part.partition("=")[0].strip() for part in text.split(",")}
        return cls(
            pp=layout.pp,
            cp=layout.cp,
            tp=layout.tp,
            ep=layout.ep,
            zero=layout.zero,
            vp=layout.vp,
            dp=layout.dp if "dp" in told else None,
            fsdp=layout.fsdp if "fsdp" in told else None,
            max_workers=max_workers,
        )

    @property
    def num_model_ranks(self) -> int:
        """Workers for each data rank."""
        return self.pp * self.cp * self.tp

    @property
    def data_axes(self) -> tuple[int, int] | None:
        """The wished (dp, fsdp), if any."""
        if self.dp is None and self.fsdp is None:
            return None
        return self.dp or 1, self.fsdp or 1

    def layout(self, dp: int, fsdp: int) -> Layout:
        """The model axes with these data axes."""
        return Layout(self.pp, dp, fsdp, self.cp, self.tp, self.ep, self.zero, self.vp)


@dataclass(frozen=True, slots=True)
class Job:
    """What the core knows of the training job.

    A step has `num_microbatches`. All state together has `state_bytes`, `param_bytes` of it
    parameters (they matter where `zero` < 3); a worker needs `margin` times its part.
    `steps` is where the run ends; a checkpoint is due at each multiple of `checkpoint_every`
    (0: only at the end). `limits` are what the model's shape allows of the model axes.
    """

    num_microbatches: int = 1
    state_bytes: int = 0
    param_bytes: int = 0
    margin: float = 1.2
    steps: int = 0
    checkpoint_every: int = 0
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What there is to train on: how many workers, and the memory of the smallest of them."""

    num_workers: int
    memory_bytes: int | None = None


def plan_layout(
    previous: Layout | None, capacity: Capacity, wish: Wish, job: Job, snapshots_cover: bool
) -> Layout | Infeasible:
    """The layout to train under; see the head of this module for what is preferred."""
    num_workers = min(capacity.num_workers, wish.max_workers or capacity.num_workers)
    if num_workers < wish.num_model_ranks:
        return Infeasible(
            f"pp={wish.pp}, cp={wish.cp}, tp={wish.tp} need {wish.num_model_ranks} workers at "
            f"least, {num_workers} are there; start more or lower a degree"
        )
    refusal = job.limits.refusal(wish.layout(1, wish.ep))
    if refusal:
        return Infeasible(refusal)
    num_data_ranks = num_workers // wish.num_model_ranks
    if wish.data_axes and wish.data_axes[0] * wish.data_axes[1] <= num_data_ranks:
        return _as_wished(wish, job, capacity, *wish.data_axes)
    candidates = _candidates(min(num_data_ranks, job.num_microbatches), wish, job, capacity)
    if not candidates:
        return _nothing_fits(num_data_ranks, wish, job, capacity)
    if not snapshots_cover and any(dp > 1 for dp, _ in candidates):
        candidates = [(dp, fsdp) for dp, fsdp in candidates if dp > 1]
    return wish.layout(*_best(candidates, previous, wish, job))


def worker_bytes(job: Job, wish: Wish, fsdp: int) -> int:
    """State bytes of one worker: what `fsdp` cuts at this ZeRO stage, divided, and the rest.

    All is divided by `pp x tp`; `cp` replicates (Rajbhandari et al., ZeRO, 2020, section 5).
    """
    whole = {0: job.state_bytes, 1: job.param_bytes, 2: job.param_bytes, 3: 0}[wish.zero]
    divided = -(-(job.state_bytes - whole) // fsdp)
    return -(-(whole + divided) // (wish.pp * wish.tp))


def _fits(job: Job, wish: Wish, capacity: Capacity, fsdp: int) -> bool:
    memory_bytes = capacity.memory_bytes
    return memory_bytes is None or worker_bytes(job, wish, fsdp) * job.margin <= memory_bytes


def _folds(wish: Wish, fsdp: int) -> bool:
    return fsdp * wish.cp * wish.tp % wish.ep == 0


def _candidates(
    num_data_ranks: int, wish: Wish, job: Job, capacity: Capacity
) -> list[tuple[int, int]]:
    """The (dp, fsdp) worth weighing: for each fsdp that fits, the most replicas."""
    return [
        (num_data_ranks // fsdp, fsdp)
        for fsdp in range(1, num_data_ranks + 1)
        if _folds(wish, fsdp) and _fits(job, wish, capacity, fsdp)
    ]


def _best(
    candidates: Sequence[tuple[int, int]], previous: Layout | None, wish: Wish, job: Job
) -> tuple[int, int]:
    costs = [-(-job.num_microbatches // (dp * fsdp)) + wish.pp - 1 for dp, fsdp in candidates]
    bound = min(costs) * (100 + STEP_TOLERANCE_PERCENT)
    quick = [pair for pair, cost in zip(candidates, costs, strict=True) if cost * 100 <= bound]
    most_replicas = max(dp for dp, _ in quick)
    equal = [pair for pair in quick if pair[0] == most_replicas]
    return min(equal, key=lambda pair: (_moved_share(previous, pair[1]), pair))


def _moved_share(previous: Layout | None, fsdp: int) -> Fraction:
    if previous is None:
        return Fraction(0)
    return 1 - Fraction(min(previous.fsdp, fsdp), max(previous.fsdp, fsdp))


def _as_wished(wish: Wish, job: Job, capacity: Capacity, dp: int, fsdp: int) -> Layout | Infeasible:
    layout = wish.layout(dp, fsdp)
    if layout.num_data_ranks > job.num_microbatches:
        return Infeasible(
            f"{layout}: {layout.num_data_ranks} data ranks, but a step has only "
            f"{job.num_microbatches} microbatches; lower dp x fsdp or the microbatch"
        )
    if not _fits(job, wish, capacity, fsdp):
        return Infeasible(f"{layout}: {_too_big(job, wish, capacity, fsdp)}")
    return layout


def _nothing_fits(num_data_ranks: int, wish: Wish, job: Job, capacity: Capacity) -> Infeasible:
    most = min(num_data_ranks, job.num_microbatches)
    foldable = [fsdp for fsdp in range(1, most + 1) if _folds(wish, fsdp)]
    if not foldable:
        return Infeasible(f"ep={wish.ep} folds out of no fsdp x cp x tp with fsdp up to {most}")
    return Infeasible(f"fsdp={foldable[-1]}: {_too_big(job, wish, capacity, foldable[-1])}")


def _too_big(job: Job, wish: Wish, capacity: Capacity, fsdp: int) -> str:
    return (
        f"a worker needs {worker_bytes(job, wish, fsdp)} bytes of state, times {job.margin}, "
        f"and has {capacity.memory_bytes}; raise fsdp (it needs workers and microbatches)"
    )
