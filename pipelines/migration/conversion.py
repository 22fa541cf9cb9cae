"""What a configuration becomes: options and settings of `elastic train`, and parts of a loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pipelines.errors import UserError

Target = Literal["settings", "loop"]
"""Settings are for built-in models and those of `transformers`, whose optimizer they describe. A
loop makes its optimizer and scheduler itself."""

ScheduleKind = Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


@dataclass(frozen=True)
class WarmupSchedule:
    """One of DeepSpeed's three schedulers with a warm-up; rates are fractions of the peak."""

    kind: ScheduleKind
    warmup_steps: int
    is_linear: bool
    first: float
    """The rate at the beginning of the warm-up."""
    total_steps: int = 0
    last: float = 0.0
    """The rate at `total_steps`, of WarmupCosineLR."""


@dataclass
class Conversion:
    """The result, which each part of the translation adds to."""

    target: Target
    num_gpus: int | None
    """The number of GPUs of the DeepSpeed job, as far as it is known."""
    tensor_ranks: int = 1
    sequence_ranks: int = 1
    axes: dict[str, int] = field(default_factory=dict)
    workers: str = ""
    options: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    microbatch: int = 0
    num_microbatches: int = 0
    optimizer: str = ""
    """The class of `torch.optim` that a loop uses."""
    optimizer_arguments: dict[str, Any] = field(default_factory=dict)
    peak: float | None = None
    """The learning rate after the warm-up."""
    schedule: WarmupSchedule | None = None
    max_grad_norm: float | None = None
    scaler: dict[str, float] = field(default_factory=dict)
    """Arguments of a loop's `GradScaler`, for float16."""

    @property
    def is_loop(self) -> bool:
        return self.target == "loop"

    @property
    def data_ranks(self) -> int | None:
        """The number of GPUs that DeepSpeed gives different data. Raises `UserError`."""
        if self.num_gpus is None:
            return None
        model_ranks = self.tensor_ranks * self.sequence_ranks
        if self.num_gpus % model_ranks:
            raise UserError(
                f"--world-size {self.num_gpus} must be a multiple of {model_ranks}, the GPUs of "
                "one replica (tensor_parallel.autotp_size x sequence_parallel_size)"
            )
        return self.num_gpus // model_ranks

    def arguments(self) -> list[str]:
        """The arguments of `elastic train`, an option and its value in each item."""
        layout = ",".join(f"{axis}={degree}" for axis, degree in self.axes.items())
        workers = {"workers": self.workers} if self.workers else {}
        options = {**workers, **({"layout": layout} if layout else {}), **self.options}
        lines = [f"--{option} {value}" for option, value in options.items()]
        return lines + [f"--set {change}" for change in self.changes()]

    def changes(self) -> list[str]:
        """The settings as `elastic train --set` accepts them."""
        return [f"{name}={_written(value)}" for name, value in self.settings.items()]


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
