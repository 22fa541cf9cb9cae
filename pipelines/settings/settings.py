"""All that a recipe may choose: frozen, typed, and refused in one line when wrong."""

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
    """Frozen, and refuses what it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ExpertsSettings(Settings):
    """The experts of a mixture, of which each token uses `top_k` (Shazeer et al., 2017).

    `shared_hidden_dim` is the width of an expert that all tokens use, 0 for none;
    `balance_coefficient` weighs the loss that keeps the experts equally busy against that of a
    token. With `top_k=1` the router learns from that loss alone.
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
                f"model.experts.top_k={self.top_k} of model.experts.num_experts="
                f"{self.num_experts}: a token cannot use more experts than there are"
            )
        return self


class TransformerSettings(Settings):
    """A decoder-only transformer of the Llama family (Touvron et al., 2023).

    `vocab_size` may exceed that of the data: 264 is bytes and the separator, rounded up to
    what divides evenly among 2, 3, 4, 6 and 8 shards. With `experts`, these stand where the one
    network of width `hidden_dim` stood in each layer.
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
                f"model.dim={self.dim} is no multiple of 2 x model.num_heads={self.num_heads}: "
                "each head needs an even width for its rotary embedding"
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model.num_heads={self.num_heads} is no multiple of "
                f"model.num_kv_heads={self.num_kv_heads}: equal groups of query heads share one"
            )
        return self


class MlpSettings(Settings):
    """A multi-layer perceptron on random vectors: small work for benchmarks and tests."""

    kind: Literal["mlp"] = "mlp"
    dims: tuple[Width, ...] = (512, 1024, 1024, 512)
    num_samples: PositiveInt = 65_536

    @model_validator(mode="after")
    def has_a_layer(self) -> MlpSettings:
        if len(self.dims) < 2:
            raise UserError(f"model.dims={self.dims}: name at least the input and output width")
        return self


class HuggingFaceSettings(Settings):
    """A causal language model of the installed `transformers`; `config` is its `config.json`,
    filled in from the folder that `init_from` names if it is empty."""

    kind: Literal["hugging_face"] = "hugging_face"
    config: dict[str, Any] = {}


class LoraSettings(Settings):
    """Low-rank adapters (Hu et al., LoRA, 2021) instead of full weights, made by `peft`.

    `rank` 0 trains the weights themselves. `targets` are the last parts of the names of the linear
    layers that get one; none are named: all but the head.
    """

    rank: NonNegativeInt = 0
    alpha: PositiveFloat = 16.0
    targets: tuple[str, ...] = ()


class CustomModelSettings(Settings):
    """A module that is the user's own, as a `pipelines.settings.recipe.Recipe` gives it."""

    kind: Literal["own"] = "own"


class DataSettings(Settings):
    """Where the text comes from and how it becomes samples.

    `source` is a file, folder or glob of text, `random` for synthetic tokens, or empty for the
    Python standard library's own sources; `tokenizer` is `bytes` or a Hugging Face `tokenizers`
    JSON file, and `separator` the token in it that parts documents (None: the usual one). With the
    `format` chat it is a JSONL file of conversations, see docs/finetune.md.
    """

    source: str = ""
    format: Literal["text", "chat"] = "text"
    tokenizer: str = "bytes"
    separator: str | None = None
    seq_len: Width = 256
    attend_across_documents: bool = False
    held_out_fraction: Fraction = 0.02


class CacheSettings(Settings):
    """How token shards that lie at a URL come to a machine; see docs/data.md.

    They are fetched into `folder` (None: one of this user's in the machine's temporary folder),
    which all workers of a machine share and which never holds more than `max_bytes`, `num_fetchers`
    at once a worker, for the samples of the next `prefetch_steps` steps. A worker that has needed
    data out of its reach for `patience_s` is given up, one that is starting after
    `reach_timeout_s`.
    """

    folder: str | None = None
    max_bytes: PositiveInt = 32 * 2**30
    num_fetchers: Annotated[int, Field(gt=0, le=1000)] = 2
    prefetch_steps: PositiveInt = 8
    patience_s: Seconds = 600.0
    reach_timeout_s: Seconds = 30.0


class NetworkSettings(Settings):
    """Where a run's processes listen; see docs/security.md.

    `interface` is the network interface of all traffic between them (None: on each machine the one
    on the route to the store), `ports` are the first and the last that are listened on, as
    `20000:20100` (None: any).
    """

    interface: str | None = None
    ports: Ports | None = None

    @property
    def port_range(self) -> tuple[int, int] | None:
        """The first and the last."""
        if self.ports is None:
            return None
        first, _, last = self.ports.partition(":")
        return int(first), int(last)


class OptimizerSettings(Settings):
    """AdamW (Loshchilov and Hutter, 2019), its learning-rate schedule and gradient clipping.

    The schedule counts in its own `warmup_steps` and `decay_steps`, so that a run may stop
    earlier or later without another schedule. The rate decays to `min_lr_ratio` of `lr`;
    `decay_steps=0` keeps it after the warm-up.
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
    """One training job. `batch` and `microbatch` count samples; `steps` is where it stops.

    `dtype` is what is computed in; with `bfloat16` the parameters stay float32 and gradients
    are reduced in float32. `record_samples` names a file that gets the ids that each data
    rank read. `checkpoint_every` is in steps, or a time such as `15min`; with `auto` the time
    between two follows their measured cost and the observed rate of failures, from 1 to 15 minutes
    (docs/checkpoints.md); with 0 only the last step is saved. Kept are the
    newest `keep_last` checkpoints (0: all), those of each multiple of `keep_every` steps, and the
    `keep_best` with the lowest held-out loss. Every `snapshot_every` steps what no other worker
    holds is copied to host memory outside of the workers; 0 is never. What a node has alone is
    then kept elsewhere, too: `snapshot_redundancy` is `copy`, or `xor:k` for the parity of it and
    of parts of k other nodes, which costs a k-th of the memory. With `reshard_after_forward` a
    block's gathered parameters are let go of between its forward and its backward. With
    `sync_each_microbatch` zero=3 reduces gradients in every backward, and keeps only their shard;
    without it whole gradients are summed, and reduced in the last. `offload` keeps the shards of
    parameters and gradients and the optimizer's state in host memory, where the optimizer then
    steps. `init_from` is a folder as `transformers` saves models: step 0 has its parameters (see
    docs/export.md). `accelerator` is what a worker asks the cluster for: `cpu`, `gpu` (of whatever
    types), one type that Ray knows, such as `L4`, or `auto`: the one type of GPU that the
    cluster has now, else a CPU.

    A step with a loss or gradient that is not finite is skipped; so many in a row as `max_skipped`
    (0: never) end the run. A loss over `spike_factor` (0: never) times the median of the latest
    `spike_window` takes the run back to before it, and the batches from there on are left out.
    Replicas are compared after every `audit_every` steps (0: never); with `audit_rollback` the run
    goes back to the last clean audit also where a majority names the one that differs.

    After every `statistics_every` steps (0: never) norms of gradients, parameters and updates, and
    what the activations are like, are told by block (docs/debugging.md).

    A run begins with all workers, or after `start_timeout_s` with the minimum. It pauses for more
    workers if that gains more than the pause costs within `growth_horizon_s`. Spares are given back
    after `standby_timeout_s`, and all workers where fewer than the minimum have come and no other
    comes in `gang_timeout_s`. Process groups form within the largest of `form_timeout_s`,
    `form_timeout_per_worker_s` for each worker, and `form_factor` times what the slowest of the
    last four formings took; the state is moved or read within `reshard_timeout_s`. A generation
    that is later is aborted; after `max_attempts` recoveries without a step the run has failed.
    Without progress for `hang_timeout_s`, or `hang_factor` median steps, a worker hangs; in the
    first step, which may compile, after `first_step_timeout_s`. A worker whose process runs but
    answers no probe for `silence_timeout_s`, or for a median step if that is longer, is suspected:
    raise it if a call in C holds the interpreter's lock longer. When a generation is aborted, a
    worker that does not answer probes gets the largest of `quiesce_deadline_s` (on a GPU
    `quiesce_deadline_cuda_s`), `quiesce_factor` median steps, and as many times what the last
    survivor took; then it is ended. After a hang the last that has not unwound is ended after
    `hang_share` of `hang_timeout_s`; of several one at a time, each time that none unwinds for as
    long as a hang takes. Any other worker gets `collective_timeout_s`, also the limit of every
    collective. The last checkpoint may take `save_timeout_s`; what was not written is tried again
    after `save_backoff_s`, doubled each time. Snapshot servers get
    `snapshot_server_timeout_s`. A controller
    that was away asks one worker for the records of steps, and after `records_timeout_s` another.
    Workers tell after every `straggler_every` steps (0: never) how long they computed; who took
    over `straggler_factor` times as long as others with the same work, `straggler_reports` times in
    a row, is replaced by a standby worker or reported. A node on which workers
    crash `quarantine_after` times (0:
    never) within `crash_window_s` gets no new ones for `quarantine_s`, or until the run has lacked
    workers for `quarantine_patience_s`.
    A run without `--detach` is saved and ends when its driver has been silent for
    `driver_timeout_s`. Workers, snapshot servers, store and controller train on for
    `orphan_timeout_s` without a sign of their controller (which Ray restarts) or driver; then each
    ends its own process.
    `--notify` tells of a run that has waited for `notify_after_s`.
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
                f"batch={self.batch} is no multiple of microbatch={self.microbatch}: "
                f"set batch to {' or '.join(ways)}{fewer}"
            )
        return self

    @model_validator(mode="after")
    def gradients_are_summed_in_float32(self) -> TrainSettings:
        if self.schedule == "zero_bubble" and self.dtype == "bfloat16":
            raise UserError(
                "schedule=zero_bubble: torch's version sums gradients in dtype=bfloat16: "
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
        """A checkpoint after each multiple of so many; 0 if they come by time, or never."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else 0

    @property
    def checkpoint_s(self) -> float:
        """A checkpoint after so many seconds; 0 if they come by steps, by `auto`, or never."""
        every = self.checkpoint_every
        is_time = isinstance(every, str) and every != "auto"
        return 60.0 * float(every.removesuffix("min")) if is_time else 0.0

    @property
    def num_microbatches(self) -> int:
        """How many microbatches make one step, over all data ranks."""
        return self.batch // self.microbatch
