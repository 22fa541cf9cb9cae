"""Training job: its size, limits and costs, and the capacity that it can train on."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.geometry.model_limits import Limits


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes a second from one worker to another: within a node, within a rack, and between racks.

    None means not measured. Two nodes without a rack label count as different racks.
    """

    node: float | None = None
    rack: float | None = None
    far: float | None = None


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
    runs_script: bool = False
    updates_per_batch: int = 1

    @property
    def num_layers(self) -> int | None:
        """The number of layers that can be dealt to pipeline stages; None means no bound."""
        return len(self.layer_costs) or self.limits.num_layers

    @property
    def knows_bandwidths(self) -> bool:
        """Whether the planner can estimate communication time."""
        return self.microbatch_s > 0 and self.bandwidths != Bandwidths()


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
