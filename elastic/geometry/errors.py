"""Errors of the core that callers may catch; each message says what is wrong and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass


class ElasticError(ValueError):
    """A request that the core refuses because of a mistake of the caller."""


class InvalidLayout(ElasticError):
    """The degrees of a layout do not make a mesh."""


class InvalidSpec(ElasticError):
    """A tensor spec does not determine where the tensor lies under a layout."""


class InvalidReshard(ElasticError):
    """A reshard that cannot be carried out: its holders lack regions that are needed."""


class InvalidRedundancy(ElasticError):
    """The setting `snapshot.redundancy` is neither `copy` nor `xor:k`."""


@dataclass(frozen=True, slots=True)
class Infeasible:
    """No solution exists; `reason` says in one line what is missing."""

    reason: str
