"""Conversion of Ray Train's configurations to options of a run; unsupported fields are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

from pipelines.errors import UserError

SCALING_HINTS = {
    "placement_strategy": "the layout decides the placement of workers; leave it out",
    "label_selector": "use accelerator_type and resources_per_worker to choose machines",
    "use_tpu": "workers run on CPUs or GPUs",
    "topology": "workers run on CPUs or GPUs",
    "elastic_resize_monitor_interval_s": "a run grows at the next step boundary once workers are "
    "ready; leave it out",
    "trainer_resources": "the controller requests no resources; leave it out",
}
RUN_HINTS = {
    "storage_filesystem": "give storage_path as a URL, e.g. s3://bucket/runs",
    "callbacks": "pass callbacks= to ElasticTrainer, derived from pipelines.callbacks.Callback",
    "stop": "use steps=, or a scheduler of Ray Tune",
    "worker_runtime_env": "pass it to ray.init(runtime_env=...)",
    "verbose": "pass verbose= to ElasticTrainer",
}
FAILURE_HINT = (
    "lost workers are replaced without a limit and the run continues; leave it out, or use "
    "max_failures=-1"
)
CHECKPOINT_HINTS = {
    "checkpoint_score_attribute": "the score is the held-out loss (lowest is best): use "
    'set={"checkpoint.keep_best": 3}',
    "checkpoint_frequency": 'use set={"checkpoint.every": 100}',
    "checkpoint_at_end": "a run always saves at its end; leave it out",
}


@dataclass(frozen=True)
class Scaling:
    """The options of a run that a ScalingConfig sets."""

    workers: str | None = None
    changes: tuple[str, ...] = ()
    per_worker: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ScalingConfig | None) -> Scaling:
        """Raises `UserError`."""
        if config is None:
            return cls()
        _refuse_other_type(config, ScalingConfig, "scaling_config")
        supported = {"num_workers", "use_gpu", "resources_per_worker", "accelerator_type"}
        _refuse_unsupported(config, supported, SCALING_HINTS)
        num_workers = config.num_workers
        is_range = isinstance(num_workers, tuple)
        min_workers, max_workers = num_workers if is_range else (num_workers, num_workers)
        accelerator = "cpu"
        if config.use_gpu:
            accelerator = config.accelerator_type or "gpu"
        elif config.accelerator_type:
            raise UserError(
                f"ScalingConfig(accelerator_type={config.accelerator_type!r}) is a type of GPU: "
                "add use_gpu=True"
            )
        per_worker = _options(config.resources_per_worker or {})
        return cls(f"{min_workers}:{max_workers}", (f"accelerator={accelerator}",), per_worker)


@dataclass(frozen=True)
class RunOptions:
    """The options of a run that a RunConfig sets; the default name is recipe and time."""

    name: str | None = None
    storage: str = "runs"
    changes: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: RunConfig | None) -> RunOptions:
        """Raises `UserError`."""
        if config is None:
            return cls()
        _refuse_other_type(config, RunConfig, "run_config")
        supported = {"name", "storage_path", "failure_config", "checkpoint_config"}
        _refuse_unsupported(config, supported, RUN_HINTS)
        _refuse_failure_limit(config.failure_config or FailureConfig())
        checkpoints = config.checkpoint_config or CheckpointConfig()
        _refuse_unsupported(checkpoints, {"num_to_keep"}, CHECKPOINT_HINTS)
        num_to_keep = checkpoints.num_to_keep
        changes = (f"checkpoint.keep_last={num_to_keep}", "checkpoint.keep_best=0")
        storage = str(config.storage_path or "runs")
        return cls(config.name, storage, () if num_to_keep is None else changes)


def changes_of(values: Mapping[str, Any], prefix: str = "") -> tuple[str, ...]:
    """Settings as `KEY=VALUE` of the command line, from dotted names or nested mappings."""
    changes: list[str] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            changes += changes_of(value, f"{prefix}{name}.")
        else:
            is_list = isinstance(value, list | tuple)
            changes.append(f"{prefix}{name}={','.join(map(str, value)) if is_list else value}")
    return tuple(changes)


def _options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Ray options of a worker's actor, besides its accelerator."""
    if resources.get("GPU", 1) != 1:
        raise UserError(
            f"ScalingConfig(resources_per_worker={{'GPU': {resources['GPU']}}}): a worker has one "
            "GPU; use more workers"
        )
    named = {"CPU": "num_cpus", "memory": "memory"}
    options: dict[str, Any] = {named[k]: v for k, v in resources.items() if k in named}
    others = {k: v for k, v in resources.items() if k not in named and k != "GPU"}
    return options | ({"resources": others} if others else {})


def _refuse_other_type(config: object, expected: type, argument: str) -> None:
    if not isinstance(config, expected):
        given = f"{type(config).__module__}.{type(config).__qualname__}"
        raise UserError(f"{argument} is a {given}: give a ray.train.{expected.__name__}")


def _refuse_unsupported(config: Any, supported: set[str], hints: Mapping[str, str]) -> None:
    """Raises `UserError` for an unsupported field that differs from its default."""
    default = type(config)()
    for field_ in fields(config):
        value = getattr(config, field_.name)
        if field_.name not in supported and value != getattr(default, field_.name):
            raise UserError(
                f"{type(config).__name__}({field_.name}={value!r}) is not supported: "
                f"{hints.get(field_.name, 'leave it out')}"
            )


def _refuse_failure_limit(config: FailureConfig) -> None:
    if config.max_failures not in (0, -1):
        raise UserError(f"FailureConfig(max_failures={config.max_failures}): {FAILURE_HINT}")
    _refuse_unsupported(config, {"max_failures"}, {})
