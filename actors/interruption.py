"""What the control thread tells the training thread without waiting for it."""

from __future__ import annotations

from actors.errors import Interrupted


class Interruption:
    """Flags between two threads; each is one integer, written by one side."""

    def __init__(self) -> None:
        self.aborted_generation = 0
        self.pause_wished_generation = 0
        self.running_generation = 0
        self.num_signs_of_life = 0

    def check(self) -> None:
        """Called by the training thread wherever it may stop. Raises `Interrupted`."""
        self.num_signs_of_life += 1
        if self.running_generation <= self.aborted_generation:
            raise Interrupted(f"generation {self.running_generation} is being aborted")

    @property
    def pause_is_wished(self) -> bool:
        return self.pause_wished_generation >= self.running_generation
