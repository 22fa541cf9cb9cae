"""What the core knows of the training job, and of what there is to train it on."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.geometry.model_limits import Limits


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes a second from one worker to another, by where the two are; None: not measured.

    Workers on nodes without a rack label are far from each other.
    """

    node: float | None = None
    rack: float | None = None
    far: float | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """What the core knows of the training job.

    A step has `num_microbatches`, each of `microbatch` samples (0: not known). All state together
    has `state_bytes`, `param_bytes` of it parameters (0: not known), and so of the experts among
    it; a worker needs `margin` times its part. `steps` is where the run ends; a checkpoint is due
    at each multiple of `checkpoint_every` (0: only at the end).
    `limits` are what the model's shape allows of the model axes, `layer_costs` what its layers
    cost (none: all the same). One microbatch takes one worker `microbatch_s`, and its hidden
    state between two layers has `activation_bytes` (0: not known). `digest` is of the driver's
    sources and tensor specs, which each worker's must equal ("": the first worker's counts).
    `seed` and `num_samples` (0: not known) give the order of the training samples; each
    `eval_every` steps (0: never) an evaluation reads the first `num_eval_samples` held-out ones.
    """

    num_microbatches: int = 1
    microbatch: int = 0
    state_bytes: int = 0
    param_bytes: int = 0
    expert_state_bytes: int = 0
    expert_param_bytes: int = 0
    margin: float = 1.2
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

    @property
    def num_layers(self) -> int | None:
        """How many layers can be dealt to pipeline stages; None bounds nothing."""
        return len(self.layer_costs) or self.limits.num_layers

    @property
    def knows_bandwidths(self) -> bool:
        """Whether the time of communication can be estimated."""
        return self.microbatch_s > 0 and self.bandwidths != Bandwidths()


@dataclass(frozen=True, slots=True)
class Capacity:
    """What there is to train on: how many workers, and the memory of the smallest of them.

    `node_size` and `rack_size` are how many of them the fullest node and rack have (1: nobody
    knows of two that share one).
    """

    num_workers: int
    memory_bytes: int | None = None
    node_size: int = 1
    rack_size: int = 1
