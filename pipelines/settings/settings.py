"""The settings model: frozen, typed settings, whose errors are reported in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    model_validator,
)

from elastic.geometry.errors import ElasticError
from elastic.reshard.parity import num_chunks_of
from pipelines.settings.bounds import (
    Depth,
    Fraction,
    Minutes,
    NonNegativeInt,
    Ports,
    PositiveInt,
    ScheduleName,
    Seconds,
    Seed,
    Share,
    SpikeFactor,
    StragglerFactor,
    TimeFactor,
    Width,
)
from pipelines.settings.errors import UserError


class Settings(BaseModel):
    """A frozen group of settings that refuses unknown names and non-finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ExpertsSettings(Settings):
    """A mixture of experts, in which each token uses `top_k` experts (Shazeer et al., 2017).

    `shared_hidden_dim` is the width of an expert that all tokens use (0: none).
    `balance_coefficient` weighs the load-balancing loss against the loss of a token. With
    `top_k=1` the router learns from the load-balancing loss alone.
    """

    num_experts: Width = 8
    top_k: Width = 2
    hidden_dim: Width = 352
    shared_hidden_dim: Annotated[int, Field(ge=0, le=10**8)] = 0
    balance_coefficient: NonNegativeFloat = 0.01

    @model_validator(mode="after")
    def enough_to_choose_from(self) -> ExpertsSettings:
        if self.top_k > self.num_experts:
            raise UserError(
                f"model.experts.top_k={self.top_k} exceeds model.experts.num_experts="
                f"{self.num_experts}: set top_k to at most {self.num_experts}"
            )
        return self


class TransformerSettings(Settings):
    """A decoder-only transformer of the Llama family (Touvron et al., 2023).

    `vocab_size` may exceed that of the data: the default 264 is 256 bytes and the separator,
    rounded up to a multiple that 2, 3, 4, 6 and 8 shards divide evenly. With `experts`, these
    replace the feed-forward network of width `hidden_dim` in each layer.
    """

    kind: Literal["transformer"] = "transformer"
    vocab_size: Width = 264
    dim: Width = 256
    num_layers: Depth = 4
    num_heads: Width = 8
    num_kv_heads: Width = 4
    hidden_dim: Width = 704
    rope_theta: PositiveFloat = 10_000.0
    norm_eps: PositiveFloat = 1e-5
    dropout: Fraction = 0.0
    experts: ExpertsSettings | None = None

    @model_validator(mode="after")
    def heads_fit(self) -> TransformerSettings:
        if self.dim % (2 * self.num_heads):
            raise UserError(
                f"model.dim={self.dim} must be a multiple of 2 x model.num_heads={self.num_heads}: "
                "the rotary embedding of a head needs an even width"
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model.num_heads={self.num_heads} must be a multiple of "
                f"model.num_kv_heads={self.num_kv_heads}: equal groups of query heads share one"
            )
        return self


class MlpSettings(Settings):
    """A multi-layer perceptron on random vectors, for benchmarks and tests."""

    kind: Literal["mlp"] = "mlp"
    dims: tuple[Width, ...] = (512, 1024, 1024, 512)
    num_samples: PositiveInt = 65_536

    @model_validator(mode="after")
    def has_a_layer(self) -> MlpSettings:
        if len(self.dims) < 2:
            raise UserError(f"model.dims={self.dims}: give at least an input and an output width")
        return self


class HuggingFaceSettings(Settings):
    """A causal language model of the installed `transformers`.

    `config` is its `config.json`; if empty, it is read from the folder that `init_from` names.
    """

    kind: Literal["hugging_face"] = "hugging_face"
    config: dict[str, Any] = {}


class LoraSettings(Settings):
    """Low-rank adapters (Hu et al., LoRA, 2021), trained instead of the weights; built by `peft`.

    `rank` 0 trains the weights themselves. `targets` are the last parts of the names of the linear
    layers that get an adapter (empty: all but the head).
    """

    rank: NonNegativeInt = 0
    alpha: PositiveFloat = 16.0
    targets: tuple[str, ...] = ()


class CustomModelSettings(Settings):
    """A custom module, built by a `pipelines.settings.recipe.Recipe`."""

    kind: Literal["own"] = "own"


class DataSettings(Settings):
    """The source of the training data and its division into samples.

    `source` is a file, folder or glob of text, `random` for synthetic tokens, or empty for the
    source files of the Python standard library. With `format` chat it is a JSONL file of
    conversations, see docs/finetune.md. `tokenizer` is `bytes` or a Hugging Face `tokenizers` JSON
    file, and `separator` its token that separates documents (None: the usual one).
    """

    source: str = ""
    format: Literal["text", "chat"] = "text"
    tokenizer: str = "bytes"
    separator: str | None = None
    seq_len: Width = 256
    attend_across_documents: bool = False
    held_out_fraction: Fraction = 0.02


class CacheSettings(Settings):
    """The cache of token shards that a machine fetches from a URL; see docs/data.md.

    `folder` (None: a folder of this user in the machine's temporary folder) is shared by all
    workers of a machine and never holds more than `max_bytes`. Each worker fetches up to
    `num_fetchers` shards at once, for the samples of the next `prefetch_steps` steps. A worker
    fails if data that it needs stay unreachable for `patience_s`, or for `reach_timeout_s` while
    it starts.
    """

    folder: str | None = None
    max_bytes: PositiveInt = 32 * 2**30
    num_fetchers: Annotated[int, Field(gt=0, le=1000)] = 2
    prefetch_steps: PositiveInt = 8
    patience_s: Seconds = 600.0
    reach_timeout_s: Seconds = 30.0


class NetworkSettings(Settings):
    """Network interface and ports of a run's processes; see docs/security.md.

    `interface` carries all traffic between them (None: on each machine the interface on the route
    to the store). `ports` is the range that they listen on, such as `20000:20100` (None: any).
    """

    interface: str | None = None
    ports: Ports | None = None

    @property
    def port_range(self) -> tuple[int, int] | None:
        """The first and the last port, or None for any."""
        if self.ports is None:
            return None
        first, _, last = self.ports.partition(":")
        return int(first), int(last)


class OptimizerSettings(Settings):
    """AdamW (Loshchilov and Hutter, 2019) with learning-rate schedule and gradient clipping.

    The schedule has its own `warmup_steps` and `decay_steps`, so a change of the run's `steps`
    does not change it. The rate decays to `min_lr_ratio` of `lr`; `decay_steps=0` keeps it
    constant after the warm-up.
    """

    lr: PositiveFloat = 1e-3
    min_lr_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    warmup_steps: NonNegativeInt = 0
    decay_steps: NonNegativeInt = 0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    max_grad_norm: PositiveFloat = 1.0


class TrainSettings(Settings):
    """The settings of one training run. `batch` and `microbatch` count samples.

    `steps` is the last step of the run. `dtype` is the dtype of the computation; with `bfloat16`
    parameters stay float32 and gradients are reduced in float32. `init_from` is a folder in the
    format of `transformers` with the parameters of step 0 (docs/export.md). `record_samples` names
    a file for the sample ids that each data rank reads. `accelerator` is the resource that a worker
    requests from the cluster: `cpu`, `gpu` (any type), a type that Ray knows, such as `L4`, or
    `auto`: the only type of GPU in the cluster, else a CPU.

    - Memory and passes: with `reshard_after_forward` a block frees its gathered parameters between
      forward and backward. With `sync_each_microbatch` zero=3 reduces gradients in every backward
      and keeps only their shard; without it, it sums whole gradients and reduces them in the last
      backward. `offload` keeps the shards of parameters and gradients and the optimizer state in
      host memory, where the optimizer then steps.
    - Checkpoints: `checkpoint_every` is a number of steps, a time such as `15min`, or 0 to save the
      last step only. With `auto` the interval follows the measured cost of a checkpoint and the
      observed failure rate, between 1 and 15 minutes (docs/checkpoints.md). The run keeps the
      newest `keep_last` checkpoints (0: all), those of multiples of `keep_every` steps, and the
      `keep_best` with the lowest held-out loss. The last checkpoint may take `save_timeout_s`; a
      failed write is retried after `save_backoff_s`, doubled each time.
    - Snapshots: every `snapshot_every` steps (0: never) a worker copies state that no other worker
      holds to a snapshot server in host memory. State that only one node holds is also stored on
      another node: `snapshot_redundancy` is `copy`, or `xor:k` for its parity with the state of k
      other nodes, which takes a k-th of the memory. A snapshot server must answer within
      `snapshot_server_timeout_s`.
    - Loss and state checks: a step with a non-finite loss or gradient is skipped; `max_skipped` (0:
      no limit) skipped steps in a row end the run. A loss over `spike_factor` (0: off) times the
      median of the latest `spike_window` losses rolls the run back to before it, and the run skips
      the batches from there on. Replicas are compared every `audit_every` steps (0: never). With
      `audit_rollback` the run rolls back to the last clean audit even if a majority identifies the
      replica that differs. Every `statistics_every` steps (0: never) the run records norms of
      gradients, parameters and updates, and activation statistics, by block (docs/debugging.md).
    - Membership: a run starts with all workers, or after `start_timeout_s` with the minimum. It
      pauses to add workers if they gain more than the pause costs within `growth_horizon_s`.
      Standby workers are released after `standby_timeout_s`. If fewer than the minimum have joined
      and no other joins within `gang_timeout_s`, all workers are released (gang back-off).
    - Recovery: process groups must form within the largest of `form_timeout_s`,
      `form_timeout_per_worker_s` times the number of workers, and `form_factor` times the slowest
      of the last four formings. The state must be moved or read within `reshard_timeout_s`. A
      generation that misses these limits is aborted; after `max_attempts` recoveries without a step
      the run fails. A worker hangs if it makes no progress for `hang_timeout_s`, or `hang_factor`
      median steps; in the first step, which may compile, for `first_step_timeout_s`. A worker whose
      process runs but answers no probe for `silence_timeout_s`, or a median step if longer, is
      suspected; raise this if a C call holds the GIL for longer.
    - Abort: when a generation is aborted, a worker that answers no probe gets the largest of
      `quiesce_deadline_s` (on a GPU `quiesce_deadline_cuda_s`), `quiesce_factor` median steps, and
      `quiesce_factor` times what the last survivor took; then it is killed. After a hang the last
      worker that has not unwound is killed after `hang_share` of `hang_timeout_s`. If several have
      not, one is killed each time that none unwinds for the duration of a hang. Any other worker
      gets `collective_timeout_s`, which also limits every collective.
    - Stragglers and bad nodes: workers report their compute time every `straggler_every` steps (0:
      never). A worker that takes over `straggler_factor` times as long as others with the same
      work, `straggler_reports` times in a row, is replaced by a standby worker, or else reported. A
      node with `quarantine_after` (0: off) worker crashes within `crash_window_s` gets no new
      workers for `quarantine_s`, or until the run has lacked workers for `quarantine_patience_s`.
    - Driver and controller: a run without `--detach` is saved and ends when its driver has been
      silent for `driver_timeout_s`. Workers, snapshot servers, store and controller continue for
      `orphan_timeout_s` without a sign of their controller (which Ray restarts) or driver; then
      each ends its own process. A restarted controller requests the records of missed steps from
      one worker, and after `records_timeout_s` from another. `--notify` reports a run that has
      waited for `notify_after_s`.
    """

    model: Annotated[
        TransformerSettings | MlpSettings | HuggingFaceSettings | CustomModelSettings,
        Field(discriminator="kind"),
    ] = TransformerSettings()
    data: DataSettings = DataSettings()
    cache: CacheSettings = CacheSettings()
    network: NetworkSettings = NetworkSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    lora: LoraSettings = LoraSettings()
    seed: Seed = 0
    init_from: str | None = None
    batch: Width = 24
    microbatch: Width = 1
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    steps: PositiveInt = 100
    eval_every: NonNegativeInt = 0
    eval_samples: PositiveInt = 64
    checkpoint_every: NonNegativeInt | Minutes | Literal["auto"] = "auto"
    keep_last: NonNegativeInt = 3
    keep_every: NonNegativeInt = 0
    keep_best: NonNegativeInt = 1
    snapshot_every: NonNegativeInt = 1
    snapshot_redundancy: str = "copy"
    statistics_every: NonNegativeInt = 0
    max_skipped: NonNegativeInt = 20
    spike_factor: SpikeFactor = 0.0
    spike_window: PositiveInt = 32
    audit_every: NonNegativeInt = 0
    audit_rollback: bool = False
    start_timeout_s: Seconds = 60.0
    form_timeout_s: Seconds = 30.0
    form_timeout_per_worker_s: Seconds = 0.1
    form_factor: TimeFactor = 3.0
    reshard_timeout_s: Seconds = 600.0
    first_step_timeout_s: Seconds = 600.0
    hang_timeout_s: Seconds = 60.0
    hang_factor: TimeFactor = 10.0
    hang_share: Share = 0.25
    max_attempts: PositiveInt = 8
    silence_timeout_s: Seconds = 5.0
    quiesce_deadline_s: Seconds = 1.0
    quiesce_deadline_cuda_s: Seconds = 10.0
    quiesce_factor: TimeFactor = 4.0
    collective_timeout_s: Seconds = 300.0
    records_timeout_s: Seconds = 10.0
    snapshot_server_timeout_s: Seconds = 10.0
    save_timeout_s: Seconds = 300.0
    save_backoff_s: Seconds = 5.0
    driver_timeout_s: Seconds = 60.0
    orphan_timeout_s: Seconds = 300.0
    growth_horizon_s: Seconds = 600.0
    standby_timeout_s: Seconds = 600.0
    gang_timeout_s: Seconds = 1800.0
    straggler_every: NonNegativeInt = 20
    straggler_factor: StragglerFactor = 2.0
    straggler_reports: PositiveInt = 3
    quarantine_after: NonNegativeInt = 3
    crash_window_s: Seconds = 600.0
    quarantine_s: Seconds = 3600.0
    quarantine_patience_s: Seconds = 30.0
    schedule: ScheduleName = "1f1b"
    reshard_after_forward: bool = True
    sync_each_microbatch: bool = True
    offload: bool = False
    activation_checkpointing: bool = False
    compile: bool = False
    accelerator: str = "auto"
    record_samples: Path | None = None
    notify_after_s: Seconds = 600.0

    @model_validator(mode="after")
    def microbatches_fill_the_batch(self) -> TrainSettings:
        if self.batch % self.microbatch:
            below = self.batch - self.batch % self.microbatch
            ways = [str(below)] if below else []
            ways.append(str(below + self.microbatch))
            fewer = f", or microbatch to {self.batch}" if not below else ""
            raise UserError(
                f"batch={self.batch} must be a multiple of microbatch={self.microbatch}: "
                f"set batch to {' or '.join(ways)}{fewer}"
            )
        return self

    @model_validator(mode="after")
    def gradients_are_summed_in_float32(self) -> TrainSettings:
        if self.schedule == "zero_bubble" and self.dtype == "bfloat16":
            raise UserError(
                "schedule=zero_bubble: torch's implementation sums gradients in bfloat16: "
                "set schedule=interleaved_1f1b or dtype=float32"
            )
        return self

    @model_validator(mode="after")
    def redundancy_is_known(self) -> TrainSettings:
        try:
            num_chunks_of(self.snapshot_redundancy)
        except ElasticError as error:
            raise UserError(str(error)) from None
        return self

    @property
    def checkpoint_steps(self) -> int:
        """Steps between two checkpoints; 0 if checkpoints are timed, or disabled."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else 0

    @property
    def checkpoint_s(self) -> float:
        """Seconds between two checkpoints; 0 if they are counted in steps, `auto`, or disabled."""
        every = self.checkpoint_every
        is_time = isinstance(every, str) and every != "auto"
        return 60.0 * float(every.removesuffix("min")) if is_time else 0.0

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of one step, over all data ranks."""
        return self.batch // self.microbatch
