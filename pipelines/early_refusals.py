"""What is refused before torch is imported: a typing error is answered at once."""

from __future__ import annotations

from elastic.errors import ElasticError
from elastic.planning import Wish
from pipelines.errors import UserError
from pipelines.overrides import near
from pipelines.refusals import parse_workers

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


def parse_layout(layout: str, max_workers: int | None = None) -> Wish:
    """The wish that `--layout` stands for. Raises `UserError`."""
    try:
        return Wish.parse(layout, max_workers)
    except ElasticError as error:
        raise UserError(f"--layout {layout}: {error}") from None
