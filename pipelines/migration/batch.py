"""The batch of a DeepSpeed configuration, which is counted for each GPU."""

from __future__ import annotations

from pipelines.errors import UserError
from pipelines.migration.configuration import Configuration
from pipelines.migration.conversion import Conversion

BATCH = "train_batch_size"
MICROBATCH = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


def convert_batch(keys: Configuration, conversion: Conversion) -> None:
    """Add `batch` and `microbatch`; as in DeepSpeed, one of the three numbers may be missing.

    Raises `UserError` if they contradict each other, or need the number of GPUs.
    """
    batch, microbatch = keys.positive(BATCH), keys.positive(MICROBATCH)
    accumulation = keys.positive(ACCUMULATION)
    if batch is None and microbatch is None:
        keys.report(ACCUMULATION, f"no value without {BATCH} or {MICROBATCH}: set batch yourself")
        return
    if batch and microbatch and accumulation and conversion.num_gpus is None:
        conversion.num_gpus = _inferred_gpus(keys, conversion, batch, microbatch, accumulation)
    ranks = conversion.data_ranks
    if microbatch is None or batch is None:
        if ranks is None:
            raise _unknown_gpus(keys, BATCH if batch else MICROBATCH)
        accumulation = accumulation or 1
        if batch is None:
            assert microbatch is not None
            batch = microbatch * accumulation * ranks
        else:
            microbatch = batch // (accumulation * ranks)
    _refuse_contradiction(keys, batch, microbatch, accumulation, ranks)
    _add(keys, conversion, batch, microbatch)


def _add(keys: Configuration, conversion: Conversion, batch: int, microbatch: int) -> None:
    conversion.microbatch, conversion.num_microbatches = microbatch, batch // microbatch
    if conversion.is_loop:
        whole = f"MICROBATCH * NUM_MICROBATCHES = {batch} samples a step"
        keys.report(MICROBATCH, f"MICROBATCH = {microbatch}, the batch_size of the DataLoader")
    else:
        conversion.settings |= {"batch": batch, "microbatch": microbatch}
        whole = f"batch={batch}"
        keys.report(MICROBATCH, f"microbatch={microbatch}")
    keys.report(BATCH, whole)
    keys.report(ACCUMULATION, f"part of {whole}: each worker takes its share of the microbatches")


def convert_elasticity(keys: Configuration, conversion: Conversion) -> None:
    """DeepSpeed's elasticity chooses the batch; here it is constant for any number of workers."""
    fewest = keys.positive("elasticity.min_gpus") or 1
    most = keys.positive("elasticity.max_gpus") or conversion.num_gpus
    if keys.is_enabled("elasticity") and most:
        conversion.workers = f"{fewest}:{most}"
        for key in ("enabled", "min_gpus", "max_gpus"):
            keys.report(f"elasticity.{key}", f"--workers {fewest}:{most}")
    elif conversion.num_gpus:
        conversion.workers = str(conversion.num_gpus)


def _inferred_gpus(
    keys: Configuration, conversion: Conversion, batch: int, microbatch: int, accumulation: int
) -> int:
    """The number of GPUs for which the three numbers agree. Raises `UserError`."""
    if batch % (microbatch * accumulation):
        raise keys.mistake(
            BATCH, f"must be a multiple of {MICROBATCH} x {ACCUMULATION} = "
            f"{microbatch * accumulation}"
        )  # fmt: skip
    replicas = batch // (microbatch * accumulation)
    return replicas * conversion.tensor_ranks * conversion.sequence_ranks


def _refuse_contradiction(
    keys: Configuration, batch: int, microbatch: int, accumulation: int | None, ranks: int | None
) -> None:
    """Raises `UserError` as DeepSpeed does: the batch is the product of all three factors."""
    share = ranks or 1
    product = microbatch * (accumulation or max(1, batch // max(1, microbatch * share))) * share
    if product != batch:
        known = f"{MICROBATCH} x {ACCUMULATION}" + (f" x {share} GPUs" if ranks else "")
        raise UserError(
            f"{keys.name}: {BATCH}={batch} must be a multiple of {known}: change one of them, or "
            "--world-size"
        )


def _unknown_gpus(keys: Configuration, key: str) -> UserError:
    return UserError(
        f"{keys.name}: {key} alone does not determine batch and microbatch: add --world-size N, "
        "the number of GPUs of the DeepSpeed job"
    )
