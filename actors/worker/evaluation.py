"""What a worker reports of an evaluation."""

from __future__ import annotations

from actors.runtime.program import Evaluation
from elastic.protocol.events import Evaluated
from elastic.protocol.wire import finite


def evaluated(generation: int, step: int, found: Evaluation) -> Evaluated:
    """The event of an evaluation: what is not finite is None there, and named."""
    numbers = {"loss": found.loss, **found.metrics}
    not_finite = sorted(n for n, v in numbers.items() if v is not None and finite(v) is None)
    metrics = tuple((name, finite(value)) for name, value in sorted(found.metrics.items()))
    return Evaluated(generation, step, finite(found.loss), metrics, tuple(not_finite))
