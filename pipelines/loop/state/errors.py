"""Errors of a custom training loop, each reported in one line."""

from __future__ import annotations

from pipelines.errors import UserError
from pipelines.settings.user_code import place_of, place_of_caller


class LoopMisused(UserError):
    """The script violates the rules of a custom training loop; the message begins with its line."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.place = place_of_caller()
        """File and line of the script, or empty if the script does not run."""

    def __str__(self) -> str:
        return f"{self.place}{self.args[0]}"


SHARDED = {
    "got mixed torch.Tensor and DTensor": (
        "the body calls a part of the model, whose weights are sharded over workers (fsdp with "
        "zero=3): call the whole model, or train with --layout dp, or zero=2"
    ),
    "out of bounds for storage of size 0": (
        "the body differentiates a gradient (create_graph), for which the weights must stay whole, "
        "but they are sharded over workers (fsdp with zero=3): train with --layout dp, or zero=2"
    ),
}
"""What an exception of the body means where weights are sharded, by a part of its text."""


def explained(error: BaseException, where: str) -> BaseException:
    """The error, or one that says what it means for the body of a step."""
    text = next((text for part, text in SHARDED.items() if part in str(error)), None)
    if text is None:
        return error
    mistake = LoopMisused(f"{where}: {text}")
    mistake.place = place_of(error)
    return mistake.with_traceback(error.__traceback__)
