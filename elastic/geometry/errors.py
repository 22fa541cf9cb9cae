"""What callers of the core may catch: each message says what, where and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass


class ElasticError(ValueError):
    """Any refusal of the core that is the caller's doing."""


class InvalidLayout(ElasticError):
    """The degrees of a layout do not make a mesh."""


class InvalidSpec(ElasticError):
    """A tensor spec does not say where the tensor lies under a layout."""


class InvalidReshard(ElasticError):
    """A re-layout that nobody can carry out: its holders do not have what is needed."""


class InvalidRedundancy(ElasticError):
    """Neither `copy` nor `xor:` and a number."""


@dataclass(frozen=True, slots=True)
class Infeasible:
    """No answer exists; `reason` is one line that says what is missing."""

    reason: str
