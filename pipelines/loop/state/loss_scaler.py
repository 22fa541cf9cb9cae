"""The scale of a script's losses under float16, as part of the run's state."""

from __future__ import annotations

from torch.amp import GradScaler


class LossScaler:
    """A loss scale that grows until gradients overflow, with the numbers of a `GradScaler`.

    Micikevicius et al., Mixed Precision Training, 2018.
    """

    def __init__(self, declared: GradScaler | None = None) -> None:
        """Without a scaler the scale is 1."""
        self.is_enabled = declared is not None and declared.is_enabled()
        self.scale, self.num_good_steps = 1.0, 0
        self._growth = self._backoff = 1.0
        self._growth_interval = 0
        if declared is not None and self.is_enabled:
            self.scale = float(declared.get_scale())
            self._growth = declared.get_growth_factor()
            self._backoff = declared.get_backoff_factor()
            self._growth_interval = declared.get_growth_interval()
        self.used = 1.0
        """The factor of the losses of the present step."""

    def update(self, skipped: bool) -> None:
        """Adapt the scale to a step that was skipped for a gradient that is not finite, or not."""
        if not self.is_enabled:
            return
        self.num_good_steps = 0 if skipped else self.num_good_steps + 1
        if skipped:
            self.scale *= self._backoff
        elif self.num_good_steps == self._growth_interval:
            self.scale, self.num_good_steps = self.scale * self._growth, 0

    def numbers(self) -> list[float]:
        """What the state keeps of it; see `load`."""
        return [self.scale, float(self.num_good_steps)] if self.is_enabled else []

    def load(self, numbers: list[float]) -> None:
        """Take what `numbers` has returned."""
        self.used = 1.0
        if numbers:
            self.scale, self.num_good_steps = numbers[0], int(numbers[1])
