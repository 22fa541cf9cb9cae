"""The `transformers` library, imported by those alone who train its models, and never online."""

from __future__ import annotations

import importlib
import os
from functools import cache
from types import ModuleType

from pipelines.settings.errors import UserError


@cache
def library(name: str = "transformers") -> ModuleType:
    """The installed `transformers`, or `peft`. Raises `UserError` if there is none."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UserError(
            f"{name} is not installed; pip install 'elastic-training[finetune]', or {name} itself"
        ) from None
    if name == "transformers":
        module.logging.set_verbosity_error()
        module.logging.disable_progress_bar()
    return module
