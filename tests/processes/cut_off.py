"""A program of which so many processes, the first that begin, have no way to the data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipelines.run.program import TrainingProgram

NOBODY = "127.0.0.1:1"


class CutOffProgram(TrainingProgram):
    """`NUM_CUT_OFF` of them look for the store where nobody listens; `CUT_OFF_FOLDER` counts."""

    def __init__(self, settings: dict[str, Any], data_folder: str) -> None:
        if _is_among_the_first(int(os.environ["NUM_CUT_OFF"])):
            place, _, _ = data_folder.partition("?")
            data_folder = f"{place}?endpoint_override=http://{NOBODY}&region=us-east-1"
        super().__init__(settings, data_folder, device="cpu")


def _is_among_the_first(num: int) -> bool:
    for number in range(num):
        try:
            Path(os.environ["CUT_OFF_FOLDER"], str(number)).touch(exist_ok=False)
        except FileExistsError:
            continue
        return True
    return False
