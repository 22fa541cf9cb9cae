"""ZeRO, offload and model parallelism of a DeepSpeed configuration, as axes of a layout."""

from __future__ import annotations

from pipelines.migration.configuration import Configuration
from pipelines.migration.conversion import Conversion

STAGE = "zero_optimization.stage"
TENSOR = "tensor_parallel.autotp_size"
SEQUENCE = "sequence_parallel_size"
MICS = "zero_optimization.mics_shard_size"
OFFLOAD = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
OLD_OFFLOAD = ("zero_optimization.cpu_offload", "zero_optimization.cpu_offload_params")


def convert_model_axes(keys: Configuration, conversion: Conversion) -> None:
    """Add `tp` and `cp`. A custom loop has neither."""
    conversion.tensor_ranks = max(1, keys.whole(TENSOR) or 0)
    conversion.sequence_ranks = max(1, keys.whole(SEQUENCE) or 0)
    for key, axis, degree in (
        (TENSOR, "tp", conversion.tensor_ranks),
        (SEQUENCE, "cp", conversion.sequence_ranks),
    ):
        if degree == 1:
            keys.report(key, "not needed because it shards nothing")
        elif conversion.is_loop:
            keys.report(key, "no counterpart: layouts of a loop are dp and fsdp (docs/layouts.md)")
        else:
            conversion.axes[axis] = degree
            models = " (the built-in transformer only)" if axis == "cp" else ""
            keys.report(key, f"--layout {axis}={degree}{models}")


def convert_zero(keys: Configuration, conversion: Conversion) -> None:
    """Add the data axes and the ZeRO stage; without a stage DeepSpeed replicates everything."""
    stage = keys.whole(STAGE) or 0
    if stage not in range(4):
        raise keys.mistake(STAGE, "must be 0, 1, 2 or 3")
    ranks = conversion.num_gpus if conversion.is_loop else conversion.data_ranks
    sharded = _sharding_group(keys, ranks)
    axes = {}
    if ranks and stage:
        axes = {"dp": ranks // sharded, "fsdp": sharded} if sharded else {"fsdp": ranks}
    elif ranks:
        axes = {"dp": ranks}
    if stage or not ranks:
        axes["zero"] = stage
    conversion.axes = axes | conversion.axes
    written = ",".join(f"{axis}={degree}" for axis, degree in axes.items())
    if keys.has(STAGE):
        keys.report(STAGE, f"--layout {written}")
    elif keys.values.get(STAGE) is None:
        keys.report_absent(STAGE, f"--layout {written}, as DeepSpeed's stage 0")
    if sharded:
        keys.report(MICS, f"--layout {written}: shards within {sharded} workers")
    _convert_offload(keys, conversion)


def _sharding_group(keys: Configuration, ranks: int | None) -> int:
    """The number of workers that share one copy of the state (MiCS); 0: all of them."""
    size = keys.whole(MICS) or 0
    if size <= 0:
        keys.report(MICS, "not needed because it is off")
        return 0
    if not ranks or ranks % size:
        keys.report(
            MICS, f"no counterpart without --world-size, a multiple of {size}: set --layout "
            f"dp=...,fsdp={size} yourself"
        )  # fmt: skip
        return 0
    return size


def _convert_offload(keys: Configuration, conversion: Conversion) -> None:
    for block in OFFLOAD:
        device = keys.text(f"{block}.device")
        if device in ("cpu", "nvme"):
            conversion.settings["offload"] = True
        if device == "nvme":
            line = "offload=true: in host memory; there is no counterpart of NVMe"
            keys.report(f"{block}.device", line)
        elif device == "cpu":
            keys.report(
                f"{block}.device", "offload=true: parameters, gradients and optimizer state"
            )
        elif device == "none":
            keys.report(f"{block}.device", "not needed because nothing is offloaded")
        elif device is not None:
            raise keys.mistake(f"{block}.device", "must be cpu, nvme or none")
        for key in keys.below(block):
            keys.report(key, "not needed because offload has no buffers to choose")
    for key in OLD_OFFLOAD:
        if keys.flag(key):
            conversion.settings["offload"] = True
            keys.report(key, "offload=true")
