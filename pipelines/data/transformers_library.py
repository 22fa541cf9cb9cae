"""Lazy, offline import of the optional `transformers` and `peft` libraries."""

from __future__ import annotations

import importlib
import os
from functools import cache
from types import ModuleType

from pipelines.errors import UserError


@cache
def library(name: str = "transformers") -> ModuleType:
    """The installed `transformers` or `peft`. Raises `UserError` if it is not installed."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read at import
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UserError(
            f"{name} is not installed; run pip install {name}, or pip install -e '.[finetune]' in "
            "this project's repository"
        ) from None
    if name == "transformers":
        module.logging.set_verbosity_error()
        module.logging.disable_progress_bar()
    return module
