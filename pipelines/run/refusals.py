"""Checks of single options, each of which needs nothing but the option itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import entry_points

from actors.storage.credentials import has_credentials, without_credentials
from elastic.geometry.errors import ElasticError
from elastic.geometry.target_layout import TargetLayout
from pipelines.settings.errors import UserError
from pipelines.settings.overrides import near

MAX_WORKERS = 100_000

TRACKING_SCHEMES = frozenset(
    "http https file sqlite postgresql postgres mysql mssql databricks databricks-uc uc".split()  # noqa: SIM905
)
"""What MLflow knows without plug-ins; a database's may name its driver, as `mysql+pymysql`."""


def refuse_unreadable(options: Mapping[str, object]) -> None:
    """Raises `UserError` for an option whose text is empty, or no text at all."""
    for option, value in options.items():
        if value is None:
            continue
        if isinstance(value, str) and not value.strip():
            raise UserError(f"{option}: it is empty; give it a value, or leave the option out")
        texts = [value] if isinstance(value, str) else value if isinstance(value, tuple) else []
        for text in texts:
            refuse_undecodable(option, text)


def refuse_undecodable(option: str, text: str) -> None:
    """Raises `UserError` for bytes that are no UTF-8, which Python shows as lone surrogates, and
    for NUL."""
    shown = text.encode("utf-8", "backslashreplace").decode()
    if shown != text:
        raise UserError(f"{option} {shown}: it is not valid UTF-8; rename or retype it")
    if "\0" in text:
        raise UserError(f"{option} {text!r}: it has a NUL character; leave that out")


def parse_workers(text: str) -> tuple[int, int]:
    """`MIN:MAX`, or `MAX` alone for any number up to it. Raises `UserError`."""
    found = re.fullmatch(r"(?:([0-9]+):)?([0-9]+)", text)
    if found is None:
        raise UserError(f"--workers {text}: write MIN:MAX, e.g. 2:4, or the most alone, e.g. 4")
    if max(len(digits or "") for digits in found.groups()) > len(str(MAX_WORKERS)) or (
        int(found[2]) > MAX_WORKERS
    ):
        raise UserError(f"--workers {text}: a run has at most {MAX_WORKERS:,} workers")
    min_workers, max_workers = int(found[1] or 1), int(found[2])
    if min_workers < 1 or max_workers < 1:
        raise UserError(f"--workers {text}: a run needs at least 1 worker")
    if min_workers > max_workers:
        raise UserError(f"--workers {text}: the minimum is over the maximum; write MIN:MAX")
    return min_workers, max_workers


def check_tracking_uri(uri: str) -> str:
    """Raises `UserError` for one with a password, and for a scheme that MLflow does not know."""
    if has_credentials(uri):
        raise UserError(
            f"--tracking-uri {without_credentials(uri)}: credentials belong in the environment, "
            "as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        )
    scheme, colon, _ = uri.partition("://")
    if not colon:
        return uri  # a path, or a word such as `databricks`
    plugins = {point.name for point in entry_points(group="mlflow.tracking_store")}
    if scheme.partition("+")[0] not in TRACKING_SCHEMES | plugins:
        raise UserError(
            f"--tracking-uri {without_credentials(uri)}: MLflow knows no store of the scheme "
            f"'{scheme}'; give a server's http(s) URL, or a database's, such as "
            "sqlite:////path/mlflow.db"
        )
    return uri


BUILT_IN = ("tiny", "tiny_moe", "byte_lm", "mlp", "finetune")
"""The recipes that have a name of their own; `recipes.py` makes them."""


def refuse_early(recipe: str, workers: str | None = None, layout: str | None = None) -> None:
    """Raises `UserError` for what `elastic train` refuses of these options for themselves."""
    refuse_unknown_recipe(recipe)
    if workers:
        parse_workers(workers)
    if layout:
        parse_layout(layout)


def refuse_unknown_recipe(name: str) -> None:
    """Raises `UserError` for a name that is neither built in nor that of a function."""
    if ":" not in name and name not in BUILT_IN:
        raise UserError(
            f"recipe {name}: there is none of that name; {near(name, list(BUILT_IN))}; "
            "or give path/to/file.py:function or module:function"
        )


def parse_layout(layout: str, max_workers: int | None = None) -> TargetLayout:
    """The wish that `--layout` stands for. Raises `UserError`."""
    try:
        return TargetLayout.parse(layout, max_workers)
    except ElasticError as error:
        raise UserError(f"--layout {layout}: {error}") from None
