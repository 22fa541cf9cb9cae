"""Uploads: checkpoints whose parts are being written, and those that will never be whole."""

from __future__ import annotations

from collections.abc import Callable

from elastic.state import CoreState, Upload


def upload_key(generation: int, step: int) -> str:
    return f"{generation}:{step}"


def open_upload(state: CoreState, generation: int, step: int, writers: set[str]) -> None:
    state.uploads.setdefault(upload_key(generation, step), Upload(step, generation, set(writers)))


def break_uploads(
    state: CoreState, which: Callable[[Upload], bool] = lambda upload: True
) -> list[Upload]:
    """Give these up; what has been written of them goes with the next that is removed."""
    broken = {key: upload for key, upload in state.uploads.items() if which(upload)}
    for key, upload in broken.items():
        del state.uploads[key]
        state.broken_uploads.append((upload.step, upload.generation))
    return list(broken.values())
