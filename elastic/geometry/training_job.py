"""Training job: its size, limits and costs, and the capacity that it can train on."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.geometry.layout import Layout
from elastic.geometry.model_limits import Limits


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes a second from one worker to another: within a node, within a rack, and between racks.

    None means not measured. Two nodes without a rack label count as different racks.
    """

    node: float | None = None
    rack: float | None = None
    far: float | None = None


UNKNOWN = Bandwidths()


STATE_MARGIN = 1.2
"""The margin of the memory model where activations are not known, for these and the allocator."""


@dataclass(frozen=True, slots=True)
class PassMemory:
    """The bytes of activations of one microbatch under a degree of `tp`, from a trial.

    Forward keeps `blocks_bytes` inside blocks and `outer_bytes` elsewhere until backward. Beyond
    these, the loss and its gradient need up to `loss_bytes` at once, and the backward of blocks up
    to `block_bytes`, with what it recomputes. At the end of backward it needs `last_bytes` in all,
    without the gradients of parameters. Both together issue `num_operations` to the device.
    """

    tp: int = 1
    blocks_bytes: int = 0
    outer_bytes: int = 0
    loss_bytes: int = 0
    block_bytes: int = 0
    last_bytes: int = 0
    num_operations: int = 0


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Bytes of the whole model, and how a step uses memory; 0 or empty: not known.

    `copy_bytes` are those of a copy of all parameters in the dtype of the computation, 0 if
    that is the stored one. `gradient_bytes` are those of all gradients (0: as many as of
    parameters). The largest of `num_blocks` has `block_bytes` of parameters, and all parameters
    outside of blocks have `root_bytes`. `layers` has, for each pipeline layer, the bytes of its
    parameters that `tp` cuts, and of the others, without experts; `tied` are those of the first
    layer that the last one has too. `passes` are trials, one for
    each degree of `tp` tried. `merges`: a pass may have several microbatches. `sums_whole`: at
    stage 3 whole gradients are summed over the microbatches of a step. `keeps_gathered`: blocks
    keep their gathered parameters from forward to backward. `offloads`: shards and the
    optimizer state are in host memory. `schedule` is that of a pipeline, and `output_bytes` the
    last stage's output of a microbatch.
    """

    copy_bytes: int = 0
    gradient_bytes: int = 0
    block_bytes: int = 0
    root_bytes: int = 0
    layers: tuple[tuple[int, int], ...] = ()
    tied: tuple[int, int] = (0, 0)
    passes: tuple[PassMemory, ...] = ()
    merges: bool = False
    sums_whole: bool = False
    keeps_gathered: bool = False
    offloads: bool = False
    schedule: str = "1f1b"
    output_bytes: int = 0
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """The collectives of an axis in one pass: `count` of one kind, with bytes in all.

    `kind` is a name of `CollectiveTimes`. A pass with n microbatches moves `fixed_bytes + n x
    microbatch_bytes`: whole tensors, as reduced, gathered, or sent.
    """

    kind: str
    count: int
    fixed_bytes: float = 0.0
    microbatch_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class StepTrial:
    """The seconds in which one worker computes a step while nothing has to be waited for.

    A step takes `step_s + passes x pass_s + microbatches x microbatch_s`. The trial had degrees
    `tp` and `cp`, and sharded parameters at the ZeRO stage `zero` (0: it did not shard).
    """

    tp: int = 1
    cp: int = 1
    zero: int = 0
    step_s: float = 0.0
    pass_s: float = 0.0
    microbatch_s: float = 0.0
    traffic: tuple[Traffic, ...] = ()

    @property
    def single_s(self) -> float:
        """The seconds of a pass with one microbatch."""
        return self.pass_s + self.microbatch_s


@dataclass(frozen=True, slots=True)
class PassShares:
    """How a pass divides: before the blocks, in all blocks, and after them with the loss.

    Each is a pair of forward and backward, as shares of the whole pass.
    """

    first: tuple[float, float] = (0.0, 0.0)
    blocks: tuple[float, float] = (1 / 3, 2 / 3)
    last: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """The seconds of a collective in a group of `num_ranks` workers of one node, by its bytes.

    `kind` is `all_reduce`, `all_gather`, `reduce_scatter` or `shift` (to the next rank). `points`
    are pairs of bytes of the whole tensor and seconds, in ascending order.
    """

    kind: str
    num_ranks: int
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """What workers of a node share, and the cost of their communication; 0 or empty: not known.

    Workers compute on `cores` of a node (0: each on a device of its own). While a collective runs
    beside compute, `interference` is the share of the shorter of both that is not hidden. A
    collective takes at least `latency_s`, and the host issues an operation in `issue_s`. The
    optimizer moves its bytes at `memory_bytes_per_s`.
    """

    cores: int = 0
    interference: float = 1.0
    latency_s: float = 0.0
    issue_s: float = 0.0
    memory_bytes_per_s: float = 0.0
    collectives: tuple[CollectiveTimes, ...] = ()


@dataclass(frozen=True, slots=True)
class Corrections:
    """Factors by which predicted steps of a layout are corrected, from earlier predictions of this
    run; `others` is that of layouts that it has not trained under."""

    by_layout: tuple[tuple[Layout, float], ...] = ()
    others: float = 1.0

    def of(self, layout: Layout) -> float:
        """The factor of a layout."""
        return next((factor for known, factor in self.by_layout if known == layout), self.others)


@dataclass(frozen=True, slots=True)
class TimeFacts:
    """What the step-time model knows beyond the size of the model; empty: not measured.

    `merges`: passes of the trials could have several microbatches.
    """

    trials: tuple[StepTrial, ...] = ()
    shares: PassShares = PassShares()
    machine: Machine = Machine()
    merges: bool = True
    corrections: Corrections = Corrections()

    @property
    def plain(self) -> StepTrial | None:
        """The trial of a whole model that is not sharded."""
        return next((t for t in self.trials if t.tp == t.cp == 1 and not t.zero), None)


@dataclass(frozen=True, slots=True)
class Job:
    """The facts about the training job that the core uses.

    A step has `num_microbatches`, each of `microbatch` samples (0: not known), and so many of them
    as `updates_per_batch` read the same batch. The whole state has
    `state_bytes`, of which `param_bytes` are parameters (0: not known); `expert_state_bytes` and
    `expert_param_bytes` are the experts' part of both. A worker needs `margin` times its part.
    The run ends after `steps`. A checkpoint is due at each multiple of `checkpoint_every` (0: only
    at the end).
    `limits` are the bounds of the model axes; `layer_costs` are the costs of the layers (empty: all
    equal). One worker computes one microbatch in `microbatch_s`, and the hidden state between two
    layers has `activation_bytes` for each microbatch (0: not known). `digest` is the digest of the
    driver's sources and tensor specs, which every worker must match ("": the first worker sets it).
    `seed` and `num_samples` (0: not known) determine the order of the training samples. Every
    `eval_every` steps (0: never) an evaluation reads the first `num_eval_samples` held-out samples.
    If it `runs_script`, workers have something to do after the last step.
    `memory` is what else the memory model uses, and `times` the step-time model. A worker has run
    out of memory if by the memory model it would need more than `most_bytes` (None: none has).
    """

    num_microbatches: int = 1
    microbatch: int = 0
    state_bytes: int = 0
    param_bytes: int = 0
    expert_state_bytes: int = 0
    expert_param_bytes: int = 0
    margin: float = STATE_MARGIN
    steps: int = 0
    checkpoint_every: int = 0
    limits: Limits = field(default_factory=Limits)
    layer_costs: tuple[int, ...] = ()
    activation_bytes: int = 0
    microbatch_s: float = 0.0
    bandwidths: Bandwidths = field(default_factory=Bandwidths)
    digest: str = ""
    seed: int = 0
    num_samples: int = 0
    eval_every: int = 0
    num_eval_samples: int = 0
    runs_script: bool = False
    updates_per_batch: int = 1
    memory: MemoryFacts = field(default_factory=MemoryFacts)
    times: TimeFacts = field(default_factory=TimeFacts)
    most_bytes: int | None = None

    @property
    def num_layers(self) -> int | None:
        """The number of layers that can be dealt to pipeline stages; None means no bound."""
        return len(self.layer_costs) or self.limits.num_layers

    @property
    def knows_bandwidths(self) -> bool:
        """Whether the planner can estimate communication time."""
        if not self.microbatch_s > 0:
            return False
        return self.bandwidths != UNKNOWN or bool(self.times.machine.collectives)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The available workers: their number and the memory of the smallest.

    `node_size` and `rack_size` are the numbers of workers on the fullest node and in the fullest
    rack (1: no two workers are known to share one).
    """

    num_workers: int
    memory_bytes: int | None = None
    node_size: int = 1
    rack_size: int = 1
