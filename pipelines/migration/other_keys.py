"""Keys of DeepSpeed that are not needed here or that have no counterpart, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

from pipelines.migration.configuration import AUTO, Configuration

NOT_NEEDED = {
    "steps_per_print": "the display and metrics.jsonl have every step",
    "wall_clock_breakdown": "each step's phases are recorded (docs/files.md) and `elastic status` "
    "sums them up",
    "memory_breakdown": "system.jsonl has the memory of each worker",
    "dump_state": "recipe.json has all settings",
    "log_level": "`elastic logs RUN --worker W` has the output of each worker",
    "tensorboard.*": "MLflow and metrics.jsonl have all metrics (docs/status.md)",
    "csv_monitor.*": "metrics.jsonl has all metrics",
    "comms_logger.*": "`elastic sweep` measures the traffic of a layout",
    "timers.*": "each step's phases are recorded (docs/files.md)",
    "checkpoint.*": "checkpoints are sharded safetensors that any layout reads",
    "load_universal_checkpoint": "checkpoints are sharded safetensors that any layout reads",
    "zero_allow_untested_optimizer": "the optimizer is checked before the run starts",
    "zero_force_ds_cpu_optimizer": "offload=true steps torch's optimizer in host memory",
    "gradient_predivide_factor": "gradients are reduced in float32",
    "prescale_gradients": "gradients are reduced in float32",
    "communication_data_type": "gradients are reduced in float32",
    "seq_parallel_communication_data_type": "gradients are reduced in float32",
    "data_types.grad_accum_dtype": "gradients are reduced in float32",
    "managed_gradient_accumulation": "step.backward is called once for each microbatch",
    "dataloader_drop_last": "a step always has the whole batch, across the end of an epoch",
    "disable_python_gc": "the run does not depend on it",
    "bf16.*": "dtype=bfloat16 updates float32 parameters and reduces gradients in float32",
    "bfloat16.*": "dtype=bfloat16 updates float32 parameters and reduces gradients in float32",
    "optimizer.legacy_fusion": "the optimizer is torch's",
    "aio.*": "nothing is written to NVMe during a step",
    "zero_optimization.stage3_gather_*": "`elastic export` and model.state_dict() gather weights",
    "zero_optimization.gather_16bit_weights_on_model_save": "`elastic export` gathers the weights",
    "zero_optimization.elastic_checkpoint": "any layout reads a checkpoint",
    "zero_optimization.load_from_fp32_weights": "checkpoints have the float32 parameters",
    "zero_optimization.ignore_unused_parameters": "parameters without gradients are allowed "
    "with zero=0 and zero=1",
    "zero_optimization.zero_hpz_partition_size": "reshard_after_forward=false avoids gathering "
    "weights twice",
    "zero_optimization.zero_quantized_*": "weights and gradients are never quantized",
    "zero_optimization.zeropp_loco_param.*": "gradients are never quantized",
    "zero_optimization.mics_hierarchical_params_gather": "torch's FSDP chooses the collectives",
    "zero_optimization.log_trace_cache_warnings": "torch's FSDP has no such cache",
    "zero_optimization.pipeline_loading_checkpoint": "each worker reads only its own regions",
    "zero_optimization.cpu_offload*": "offload=true covers parameters and optimizer state",
    "zero_optimization.*": "torch's FSDP chooses buckets, prefetching and overlap by itself",
    "elasticity.prefer_larger_batch": "the batch is constant",
    "elasticity.ignore_non_elastic_batch_info": "the batch is constant",
    "elasticity.min_time": "growth.horizon_s decides when a run pauses to grow",
    "elasticity.version": "layouts are chosen by cost",
    "elasticity.num_gpus_per_node": "layouts are chosen by cost",
    "elasticity.model_parallel_size": "--layout has the model axes",
    "flops_profiler.*": "the run records its own model FLOPs utilization",
    "autotuning.*": "`elastic sweep` compares layouts",
}
NO_COUNTERPART = {
    "wandb.*": "metrics go to MLflow and metrics.jsonl",
    "comet.*": "metrics go to MLflow and metrics.jsonl",
    "monitor_config.*": "metrics go to MLflow and metrics.jsonl",
    "torch_autocast.*": "write torch.autocast in the body of a loop, or set dtype=bfloat16",
    "amp.*": "write torch.autocast in the body of a loop, or set dtype=bfloat16",
    "fp16.*": "dtype is float32, bfloat16 or float64",
    "gradient_allreduce_op": "gradients are those of the mean loss",
    "sparse_gradients": "gradients are dense",
    "disable_allgather": "torch's FSDP chooses the collectives",
    "data_types.*": "dtype applies to the whole computation",
    "elasticity.max_train_batch_size": "the batch is constant; choose --set batch yourself",
    "elasticity.micro_batch_sizes": "the batch is constant; choose --set microbatch yourself",
    "elasticity.*": "the batch is constant; --workers MIN:MAX is the range of workers",
    "zero_optimization.offload_optimizer": "give its device, cpu or none",
    "zero_optimization.offload_param": "give its device, cpu or none",
    "zero_optimization.zenflow.*": "the optimizer steps after the backward pass",
    "zero_optimization.leaf_module.*": "name the sharded modules in Recipe.blocks",
    "zero_optimization.round_robin_gradients": "offload=true has one way to copy gradients",
    "pipeline.*": "add pp=N to --layout, and the recipe's `pipeline` (docs/custom-model.md)",
    "tensor_parallel.*": "the model's plan says what tp shards (docs/layouts.md)",
    "expert_parallel.*": "ep deals the experts that a recipe names (docs/custom-model.md)",
    "use_data_before_expert_parallelism": "the layout places the ranks of ep (docs/layouts.md)",
    "compile.*": "set compile=true, which compiles block by block",
    "curriculum_learning.*": "sample order is a shuffle that depends on the seed alone",
    "data_efficiency.*": "sample order is a shuffle that depends on the seed alone",
    "progressive_layer_drop.*": "write it into the model",
    "compression_training.*": "compress the exported model",
    "quantize_training.*": "compress the exported model",
    "weight_quantization.*": "compress the exported model",
    "eigenvalue.*": "compress the exported model",
    "sparse_attention.*": "write it into the model",
    "hybrid_engine.*": "the platform trains and does not generate",
    "nebula.*": "checkpoints go to --storage",
    "datastates_ckpt.*": "checkpoints go to --storage",
    "graph_harvesting": "no CUDA graph is captured",
    "vocabulary_size": "model.vocab_size is that of the model",
}


def report_others(keys: Configuration) -> None:
    """Report every key that has no line yet."""
    for key, value in keys.values.items():
        if key in keys.lines:
            continue
        needed, missing = _match(NOT_NEEDED, key), _match(NO_COUNTERPART, key)
        if block := _disabled_block(keys, key):
            is_auto = keys.values[f"{block}.enabled"] == AUTO
            line = f"no value while {block}.enabled is auto"
            keys.report(key, line if is_auto else f"not needed because {block}.enabled is not true")
        elif missing and len(missing) > len(needed):
            is_off = value is False or value is None
            reason = f"no counterpart: {NO_COUNTERPART[missing]}"
            keys.report(key, "not needed because it is off" if is_off else reason)
        elif needed:
            keys.report(key, f"not needed because {NOT_NEEDED[needed]}")
        else:
            keys.report(key, f"unknown, without effect{_similar(key)}")


def _disabled_block(keys: Configuration, key: str) -> str:
    """The block around a key that is switched off, or empty."""
    parts = key.split(".")
    for length in range(1, len(parts)):
        block = ".".join(parts[:length])
        if f"{block}.enabled" in keys.values and not keys.is_enabled(block):
            return block
    return ""


def _match(reasons: Mapping[str, str], key: str) -> str:
    """The longest pattern that the key, or the key as an empty block, matches; or empty."""
    patterns = [name for name in reasons if fnmatchcase(key, name) or fnmatchcase(f"{key}.", name)]
    return max(patterns, key=len, default="")


def _similar(key: str) -> str:
    known = [name for name in (*NOT_NEEDED, *NO_COUNTERPART) if "*" not in name]
    known += ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
    known += ["gradient_clipping", "zero_optimization.stage", "bf16.enabled", "fp16.enabled"]
    known += ["optimizer.type", "scheduler.type", "zero_optimization.offload_optimizer.device"]
    known += ["optimizer.params.lr", "optimizer.params.betas", "optimizer.params.weight_decay"]
    close = get_close_matches(key, known, n=1, cutoff=0.75)
    return f"; similar: {close[0]}" if close else ""
