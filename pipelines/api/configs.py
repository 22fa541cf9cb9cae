"""Ray Train's configurations as arguments of a run; what a run knows nothing of is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

from pipelines.settings.errors import UserError

SCALING_HINTS = {
    "placement_strategy": "workers are placed by what their layout shares; leave it out",
    "label_selector": "machines are chosen by accelerator_type and resources_per_worker",
    "use_tpu": "CPUs and GPUs are known",
    "topology": "CPUs and GPUs are known",
    "elastic_resize_monitor_interval_s": "a run grows at the next step boundary once workers are "
    "ready; leave it out",
    "trainer_resources": "the controller asks for none",
}
RUN_HINTS = {
    "storage_filesystem": "give storage_path as a URL, e.g. s3://bucket/runs",
    "callbacks": "`start()` returns a handle with metrics and events",
    "stop": "give steps=, or stop by a scheduler of Ray Tune",
    "worker_runtime_env": "give it to ray.init(runtime_env=...)",
    "verbose": "give verbose= to the trainer itself",
}
FAILURE_HINT = (
    "workers that are lost are replaced without a limit, and the run goes on; leave it out, or "
    "give max_failures=-1"
)
CHECKPOINT_HINTS = {
    "checkpoint_score_attribute": 'the lowest held-out loss decides: set={"keep_best": 3}',
    "checkpoint_frequency": 'give set={"checkpoint_every": 100}',
    "checkpoint_at_end": "a run that ends has saved a last one",
}


@dataclass(frozen=True)
class Scaling:
    """What a ScalingConfig says of a run."""

    workers: str | None = None
    changes: tuple[str, ...] = ()
    per_worker: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ScalingConfig | None) -> Scaling:
        """Raises `UserError`."""
        if config is None:
            return cls()
        _refuse_another(config, ScalingConfig, "scaling_config")
        known = {"num_workers", "use_gpu", "resources_per_worker", "accelerator_type"}
        _refuse_others(config, known, SCALING_HINTS)
        number = config.num_workers
        least, most = number if isinstance(number, tuple) else (number, number)
        accelerator = "cpu"
        if config.use_gpu:
            accelerator = config.accelerator_type or "gpu"
        elif config.accelerator_type:
            raise UserError(
                f"ScalingConfig(accelerator_type={config.accelerator_type!r}): it is a type of "
                "GPU; give use_gpu=True with it"
            )
        per_worker = _options(config.resources_per_worker or {})
        return cls(f"{least}:{most}", (f"accelerator={accelerator}",), per_worker)


@dataclass(frozen=True)
class RunOptions:
    """What a RunConfig says of a run; without one the run is named by recipe and time."""

    name: str | None = None
    storage: str = "runs"
    changes: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: RunConfig | None) -> RunOptions:
        """Raises `UserError`."""
        if config is None:
            return cls()
        _refuse_another(config, RunConfig, "run_config")
        known = {"name", "storage_path", "failure_config", "checkpoint_config"}
        _refuse_others(config, known, RUN_HINTS)
        _refuse_limits(config.failure_config or FailureConfig())
        kept = config.checkpoint_config or CheckpointConfig()
        _refuse_others(kept, {"num_to_keep"}, CHECKPOINT_HINTS)
        number = kept.num_to_keep
        changes = () if number is None else (f"keep_last={number}", "keep_best=0")
        return cls(config.name, str(config.storage_path or "runs"), changes)


def changes_of(values: Mapping[str, Any], prefix: str = "") -> tuple[str, ...]:
    """Settings by their names, or nested by the parts of these, as the command line has them."""
    changes: list[str] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            changes += changes_of(value, f"{prefix}{name}.")
        else:
            is_list = isinstance(value, list | tuple)
            changes.append(f"{prefix}{name}={','.join(map(str, value)) if is_list else value}")
    return tuple(changes)


def _options(resources: Mapping[str, float]) -> dict[str, Any]:
    """As options of a worker's actor, beside those of its accelerator."""
    if resources.get("GPU", 1) != 1:
        raise UserError(
            f"ScalingConfig(resources_per_worker={{'GPU': {resources['GPU']}}}): a worker has one "
            "device; give more workers"
        )
    named = {"CPU": "num_cpus", "memory": "memory"}
    options: dict[str, Any] = {named[k]: v for k, v in resources.items() if k in named}
    others = {k: v for k, v in resources.items() if k not in named and k != "GPU"}
    return options | ({"resources": others} if others else {})


def _refuse_another(config: object, kind: type, argument: str) -> None:
    if not isinstance(config, kind):
        told = f"{type(config).__module__}.{type(config).__qualname__}"
        raise UserError(f"{argument}: {told} is none; give a ray.train.{kind.__name__}")


def _refuse_others(config: Any, known: set[str], hints: Mapping[str, str]) -> None:
    """Whatever differs from the default would otherwise be passed over in silence."""
    plain = type(config)()
    for told in fields(config):
        value = getattr(config, told.name)
        if told.name not in known and value != getattr(plain, told.name):
            raise UserError(
                f"{type(config).__name__}({told.name}={value!r}) is not supported: "
                f"{hints.get(told.name, 'leave it out')}"
            )


def _refuse_limits(config: FailureConfig) -> None:
    if config.max_failures not in (0, -1):
        raise UserError(f"FailureConfig(max_failures={config.max_failures}): {FAILURE_HINT}")
    _refuse_others(config, {"max_failures"}, {})
