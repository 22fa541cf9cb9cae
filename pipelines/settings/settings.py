"""The settings of a run: one model holds the default and the description of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from pipelines.errors import UserError
from pipelines.settings.bounds import (
    Fraction,
    NonNegativeInt,
    Ports,
    PositiveInt,
    Recomputation,
    ScheduleName,
    Seconds,
    Seed,
    Width,
)
from pipelines.settings.fault_tolerance import (
    AuditSettings,
    CheckpointSettings,
    FailureSettings,
    GrowthSettings,
    HealthSettings,
    LossMonitorSettings,
    QuarantineSettings,
    SnapshotSettings,
    StragglerSettings,
)
from pipelines.settings.market import MarketSettings
from pipelines.settings.models import (
    CustomModelSettings,
    HuggingFaceSettings,
    LoraSettings,
    MlpSettings,
    TransformerSettings,
)
from pipelines.settings.setting import Settings, entries_of, setting


class DataSettings(Settings):
    """The source of the training data and its division into samples; see docs/data.md."""

    source: str = setting(
        "",
        "A file, folder or glob of text, `random` for synthetic tokens, or empty for the source "
        "files of the Python standard library.",
    )
    format: Literal["text", "chat"] = setting(
        "text",
        "With `chat`, `source` is a JSONL file of conversations; see docs/finetune.md.",
    )
    tokenizer: str = setting("bytes", "`bytes`, or a Hugging Face `tokenizers` JSON file.")
    separator: str | None = setting(
        None,
        "The token that separates documents; None: the first of `</s>`, `<eos>` and other usual "
        "ones that the tokenizer has.",
    )
    seq_len: Width = setting(256, "The number of tokens of a sample.")
    attend_across_documents: bool = setting(
        False, "Whether tokens attend to tokens of other documents in the same sample."
    )
    held_out_fraction: Fraction = setting(
        0.02, "The fraction of the documents that is held out for evaluation."
    )


class CacheSettings(Settings):
    """The cache of token shards that a machine fetches from a URL; see docs/data.md."""

    folder: str | None = setting(
        None,
        "The folder of the cache, shared by all workers of a machine; None: a folder of this user "
        "in the machine's temporary folder.",
    )
    max_bytes: PositiveInt = setting(32 * 2**30, "The cache never holds more than this.")
    max_weights_bytes: PositiveInt = setting(
        256 * 2**30,
        "Copies of weights at URLs (`init_from`) never take more than this on a machine.",
    )
    num_fetchers: Annotated[int, Field(gt=0, le=1000)] = setting(
        2, "The number of shards that each worker fetches at once."
    )
    prefetch_steps: PositiveInt = setting(
        8, "Shards are fetched for the samples of this many next steps."
    )
    patience_s: Seconds = setting(
        600.0, "A worker fails if data that it needs stay unreachable for this long."
    )
    reach_timeout_s: Seconds = setting(30.0, "How long a starting worker tries to reach the data.")


class ReadingSettings(Settings):
    """Reader processes, which read samples ahead of training; see docs/data.md."""

    num_readers: Annotated[int, Field(ge=0, le=1000)] = setting(
        0, "The number of reader processes of each worker; 0: the training thread reads."
    )
    prefetch_factor: PositiveInt = setting(2, "How many passes each reader reads ahead.")
    pin_memory: bool = setting(
        True, "A batch is copied to a GPU through pinned memory, while the GPU computes."
    )
    max_mib: PositiveInt = setting(
        1024, "Batches that a worker's readers have read ahead occupy at most this many MiB."
    )
    sample_timeout_s: Seconds = setting(
        600.0, "The run fails if reading one sample takes longer than this."
    )


class NetworkSettings(Settings):
    """Network interface and ports of a run's processes; see docs/security.md."""

    interface: str | None = setting(
        None,
        "The network interface of all traffic between the processes; None: on each machine the one "
        "on the route to the store.",
    )
    ports: Ports | None = setting(
        None,
        "The ports of the store, the snapshot servers and the workers' link servers, such as "
        "`20000:20100`; None: any. They do not limit Gloo and NCCL.",
    )

    @property
    def port_range(self) -> tuple[int, int] | None:
        """The first and the last port, or None for any."""
        if self.ports is None:
            return None
        first, _, last = self.ports.partition(":")
        return int(first), int(last)


class OptimizerSettings(Settings):
    """AdamW (Loshchilov and Hutter, 2019) with learning-rate schedule and gradient clipping.

    The schedule has its own steps, so a change of the run's `steps` does not change it.
    """

    lr: PositiveFloat = setting(1e-3, "The learning rate after the warm-up.")
    min_lr_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = setting(
        0.1, "The rate decays to this fraction of `lr`."
    )
    warmup_steps: NonNegativeInt = setting(0, "The steps in which the rate rises to `lr`.")
    decay_steps: NonNegativeInt = setting(
        0, "The steps in which the rate decays; 0: it stays constant after the warm-up."
    )
    beta1: Fraction = setting(0.9, "The decay rate of the mean of gradients.")
    beta2: Fraction = setting(0.95, "The decay rate of the mean of squared gradients.")
    eps: PositiveFloat = setting(1e-8, "Added to the denominator of an update.")
    weight_decay: NonNegativeFloat = setting(
        0.1, "The coefficient of decoupled weight decay, for matrices only."
    )
    max_grad_norm: PositiveFloat = setting(1.0, "Gradients are clipped to this norm.")


BUILT_IN_EVAL_SAMPLES = 64


class TrainSettings(Settings):
    """The settings of one training run."""

    model: Annotated[
        TransformerSettings | MlpSettings | HuggingFaceSettings | CustomModelSettings,
        Field(discriminator="kind"),
    ] = setting(TransformerSettings(), "The model.")
    data: DataSettings = setting(DataSettings(), "The training data.")
    optimizer: OptimizerSettings = setting(OptimizerSettings(), "The optimizer.")
    lora: LoraSettings = setting(LoraSettings(), "Low-rank adapters.")
    seed: Seed = setting(0, "The seed of initial values, sample order and dropout.")
    init_from: str | None = setting(
        None,
        "A folder in the format of `transformers`, also at a URL, with the parameters of step 0 "
        "(docs/export.md).",
    )
    batch: Width = setting(24, "The number of samples of a step, over all workers.")
    microbatch: Width = setting(
        1, "The number of samples of a microbatch; `batch` is a multiple of it."
    )
    updates_per_batch: PositiveInt = setting(
        1, "The number of steps in a row that train on the same batch, as those of a GAN do."
    )
    pass_samples: PositiveInt | Literal["auto"] = setting(
        "auto",
        "The most samples of one forward and backward pass. A worker merges its microbatches of a "
        "step into passes where that is the same computation; `auto`: as many as fit in memory.",
        resumable=True,
    )
    dtype: Literal["float32", "float64", "bfloat16"] = setting(
        "float32",
        "The dtype of the computation. With `bfloat16` the optimizer still updates float32 "
        "parameters, and gradients are reduced in float32.",
    )
    steps: PositiveInt = setting(100, "The last step of the run.", resumable=True)
    eval_every: NonNegativeInt = setting(
        0,
        "The held-out loss is measured at each multiple of this many steps; 0: never.",
        resumable=True,
    )
    eval_samples: PositiveInt | None = setting(
        None,
        "The most held-out samples that an evaluation uses; None: all of a model of your own, else "
        "64.",
        resumable=True,
    )
    schedule: ScheduleName = setting(
        "1f1b",
        "The pipeline schedule: `gpipe`, `1f1b`, `interleaved_1f1b` or `zero_bubble`.",
        resumable=True,
    )
    reshard_after_forward: bool = setting(
        True,
        "Whether a block frees its gathered parameters between forward and backward.",
        resumable=True,
    )
    sync_each_microbatch: bool = setting(
        True,
        "Whether zero=3 reduces gradients in every backward and keeps only their shard. If not, it "
        "sums whole gradients and reduces them in the last backward.",
        resumable=True,
    )
    offload: bool = setting(
        False,
        "Whether the shards of parameters and gradients and the optimizer state stay in host "
        "memory, where the optimizer then steps.",
        resumable=True,
    )
    activation_checkpointing: Recomputation = setting(
        "none",
        "Which activations of a block backward recomputes instead of keeping them: `none`, `full`, "
        "or `selective`: all but the results of matrix products and fused attention.",
        resumable=True,
    )
    compile: bool = setting(
        False, "Whether blocks are compiled by `torch.compile`.", resumable=True
    )
    peak_tflops: PositiveFloat | None = setting(
        None,
        "The most operations in 10^12 a second that a worker's device can do in the run's data "
        "type, of which model FLOPs utilization is the share. None: half precision of known GPUs.",
        resumable=True,
    )
    accelerator: str = setting(
        "auto",
        "The resource that a worker requests from the cluster: `cpu`, `gpu` (any type), a type "
        "that Ray knows, such as `L4`, or `auto`: the only type of GPU in the cluster, else a CPU.",
        resumable=True,
    )
    statistics_every: NonNegativeInt = setting(
        0,
        "At each multiple of this many steps the run records norms of gradients, parameters and "
        "updates, and activation statistics, by block (docs/debugging.md); 0: never.",
        resumable=True,
    )
    record_samples: Path | None = setting(
        None, "A file for the sample ids that each data rank reads.", resumable=True
    )
    notify_after_s: Seconds = setting(
        600.0, "`--notify` reports a run that has waited for this long.", resumable=True
    )
    checkpoint: CheckpointSettings = setting(CheckpointSettings(), "Checkpoints.", resumable=True)
    snapshot: SnapshotSettings = setting(SnapshotSettings(), "Snapshots.", resumable=True)
    growth: GrowthSettings = setting(GrowthSettings(), "Number of workers.", resumable=True)
    market: MarketSettings = setting(MarketSettings(), "Spot and on demand.", resumable=True)
    failure: FailureSettings = setting(
        FailureSettings(), "Failure detection and recovery.", resumable=True
    )
    loss_monitor: LossMonitorSettings = setting(
        LossMonitorSettings(), "Loss monitor.", resumable=True
    )
    audit: AuditSettings = setting(AuditSettings(), "Audits.", resumable=True)
    straggler: StragglerSettings = setting(StragglerSettings(), "Stragglers.", resumable=True)
    health: HealthSettings = setting(HealthSettings(), "Health checks.", resumable=True)
    quarantine: QuarantineSettings = setting(QuarantineSettings(), "Quarantine.", resumable=True)
    cache: CacheSettings = setting(CacheSettings(), "Cache of token shards.", resumable=True)
    reading: ReadingSettings = setting(ReadingSettings(), "Reader processes.", resumable=True)
    network: NetworkSettings = setting(NetworkSettings(), "Network.", resumable=True)

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
    def selective_recomputation_is_possible(self) -> TrainSettings:
        if self.compile and self.activation_checkpointing == "selective":
            raise UserError(
                "activation_checkpointing=selective: a compiled block recomputes cheap operations "
                "by itself: set activation_checkpointing to none or full, or compile=false"
            )
        if self.schedule == "zero_bubble" and self.activation_checkpointing == "selective":
            raise UserError(
                "activation_checkpointing=selective: schedule=zero_bubble recomputes a block for "
                "each of its parameters: set activation_checkpointing to none or full, or "
                "schedule=interleaved_1f1b"
            )
        return self

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of one step, over all data ranks."""
        return self.batch // self.microbatch

    def first_of_batch(self, step: int) -> int:
        """The first of the steps, counted from 1, that train on the same batch as this one."""
        return step - (step - 1) % self.updates_per_batch

    def num_evaluated(self, num_held_out: int) -> int:
        """How many of so many held-out samples an evaluation uses."""
        if self.eval_samples is None and self.model.kind == "custom":
            return num_held_out
        return min(self.eval_samples or BUILT_IN_EVAL_SAMPLES, num_held_out)

    @property
    def may_merge(self) -> bool:
        """Whether a pass may have more than one microbatch."""
        return self.pass_samples == "auto" or self.pass_samples >= 2 * self.microbatch


RESUMABLE_SETTINGS = frozenset(
    entry.name for entry in entries_of(TrainSettings) if entry.is_resumable
)
"""Full names of the settings that a resumed run may change.

All others are training settings: they define the computation, so a resumed run must keep them.
"""
