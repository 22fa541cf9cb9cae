"""The event by which a worker reports an evaluation."""

from __future__ import annotations

from actors.runtime.program import Evaluation
from elastic.protocol.events import Evaluated
from elastic.protocol.wire import finite


def evaluated(generation: int, step: int, evaluation: Evaluation) -> Evaluated:
    """Make the event of an evaluation. Numbers that are not finite become None and are named."""
    numbers = {"loss": evaluation.loss, **evaluation.metrics}
    not_finite = sorted(n for n, v in numbers.items() if v is not None and finite(v) is None)
    metrics = tuple((name, finite(value)) for name, value in sorted(evaluation.metrics.items()))
    return Evaluated(generation, step, finite(evaluation.loss), metrics, tuple(not_finite))
