"""A program whose first processes cannot reach the data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipelines.run.program import TrainingProgram

UNUSED_ADDRESS = "127.0.0.1:1"


class UnreachableDataProgram(TrainingProgram):
    """The first `NUM_CUT_OFF` processes get an address at which no server listens.

    `CUT_OFF_FOLDER` holds one file for each of them.
    """

    def __init__(self, settings: dict[str, Any], data_folder: str) -> None:
        if _is_among_the_first(int(os.environ["NUM_CUT_OFF"])):
            url, _, _ = data_folder.partition("?")
            data_folder = f"{url}?endpoint_override=http://{UNUSED_ADDRESS}&region=us-east-1"
        super().__init__(settings, data_folder, device="cpu")


def _is_among_the_first(num: int) -> bool:
    for number in range(num):
        try:
            Path(os.environ["CUT_OFF_FOLDER"], str(number)).touch(exist_ok=False)
        except FileExistsError:
            continue
        return True
    return False
