"""Parsing and checks of single command-line options."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from actors.storage.credentials import has_credentials, without_credentials
from actors.storage.reachability import refuse_unreachable
from elastic.geometry.errors import ElasticError
from elastic.geometry.target_layout import TargetLayout
from pipelines.errors import UserError, refuse_undecodable
from pipelines.observe.history.run_folder import RunFolder
from pipelines.settings.overrides import refuse_changes, similar_names
from pipelines.settings.script_file import file_and_function

MAX_WORKERS = 100_000

TRACKING_SCHEMES = frozenset(
    "http https file sqlite postgresql postgres mysql mssql databricks databricks-uc uc".split()  # noqa: SIM905
)
"""MLflow's schemes without plug-ins; that of a database may name a driver: `mysql+pymysql`."""


def refuse_unreadable(options: Mapping[str, object]) -> None:
    """Raises `UserError` for an option whose value is empty or not valid text."""
    for option, value in options.items():
        if value is None:
            continue
        if isinstance(value, str) and not value.strip():
            raise UserError(f"{option} is empty; give it a value, or leave the option out")
        texts = [value] if isinstance(value, str) else value if isinstance(value, tuple) else []
        for text in texts:
            refuse_undecodable(option, text)


def parse_workers(text: str) -> tuple[int, int]:
    """Read `MIN:MAX`, or `MAX` for `1:MAX`. Raises `UserError`."""
    match = re.fullmatch(r"(?:([0-9]+):)?([0-9]+)", text)
    if match is None:
        raise UserError(f"--workers {text}: write MIN:MAX, e.g. 2:4, or MAX, e.g. 4")
    if max(len(digits or "") for digits in match.groups()) > len(str(MAX_WORKERS)) or (
        int(match[2]) > MAX_WORKERS
    ):
        raise UserError(f"--workers {text}: a run has at most {MAX_WORKERS:,} workers")
    min_workers, max_workers = int(match[1] or 1), int(match[2])
    if min_workers < 1 or max_workers < 1:
        raise UserError(f"--workers {text}: a run needs at least 1 worker")
    if min_workers > max_workers:
        raise UserError(f"--workers {text}: MIN is greater than MAX; write MIN:MAX")
    return min_workers, max_workers


def check_tracking_uri(uri: str) -> str:
    """The URI. Raises `UserError` if it has a password, or a scheme that MLflow does not know."""
    if has_credentials(uri):
        raise UserError(
            f"--tracking-uri {without_credentials(uri)}: put credentials in the environment, as "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        )
    scheme, colon, _ = uri.partition("://")
    if not colon:
        return uri  # a path, or a word such as `databricks`
    plugins = {point.name for point in entry_points(group="mlflow.tracking_store")}
    if scheme.partition("+")[0] not in TRACKING_SCHEMES | plugins:
        raise UserError(
            f"--tracking-uri {without_credentials(uri)}: MLflow does not support the scheme "
            f"'{scheme}'; give the http(s) URL of a server, or that of a database, such as "
            "sqlite:////path/mlflow.db"
        )
    return uri


def refuse_unusable(folder: RunFolder) -> None:
    """Raises `UserError` for storage that cannot be reached or written."""
    path = folder.path
    if path is None:
        try:
            refuse_unreachable(folder.url)
        except OSError as error:
            raise UserError(f"--storage {folder.storage}: cannot be reached ({error})") from None
        return  # a trial write would cost as much as `store_recipe`
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    if not nearest.is_dir():
        raise unwritable(folder, f"{nearest} is not a folder")
    if not os.access(nearest, os.W_OK):
        raise unwritable(folder, f"no permission to write in {nearest}")


def unwritable(folder: RunFolder, why: str | None) -> UserError:
    return UserError(
        f"--storage {folder.storage}: cannot be written ({why}); choose a writable folder or URL"
    )


BUILT_IN = ("tiny", "tiny_moe", "byte_lm", "mlp", "finetune")
"""Names of the built-in recipes, which `recipes.py` defines."""


def refuse_early(
    recipe: str,
    changes: Sequence[str],
    workers: str | None = None,
    layout: str | None = None,
) -> None:
    """Check these options before heavy imports. Raises `UserError`."""
    refuse_unknown_recipe(recipe)
    refuse_changes(changes)
    if workers:
        parse_workers(workers)
    if layout:
        parse_layout(layout)


def give_words(recipe: str, words: list[str]) -> None:
    """Make these words the command-line arguments of a recipe's file, from now on in this process.

    Raises `UserError` for words that no file can get.
    """
    place, _ = file_and_function(recipe)
    if place.endswith(".py"):
        sys.argv = [place, *words]
    elif words:
        raise UserError(
            f"{words[0]}: only path/to/file.py and path/to/file.py:function take arguments, as in "
            "`elastic train file.py:main -- --lr 3e-4`"
        )


def refuse_unknown_recipe(name: str) -> None:
    """Raises `UserError` for a name that is neither a built-in recipe nor a function's, and for one
    of a file that does not exist."""
    place, _ = file_and_function(name)
    if place.endswith(".py") and not Path(place).is_file():
        raise UserError(f"recipe {name}: there is no file {place}")
    if ":" not in name and not place and name not in BUILT_IN:
        raise UserError(
            f"recipe {name}: there is no built-in recipe of that name; "
            f"{similar_names(name, list(BUILT_IN))}; or write path/to/file.py, "
            "path/to/file.py:function or module:function"
        )


def parse_layout(layout: str, max_workers: int | None = None) -> TargetLayout:
    """The target layout of `--layout`. Raises `UserError`."""
    try:
        return TargetLayout.parse(layout, max_workers)
    except ElasticError as error:
        raise UserError(f"--layout {layout}: {error}") from None
