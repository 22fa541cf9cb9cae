"""Measured steps: how long those of the present layout take, and how wrong predictions were.

The step-time model takes the time of a microbatch from the median step of the present layout, and
predicts other layouts relative to it. When a run trains under another layout, its first
`NUM_COMPARED` steps are compared with the prediction. The error of a layout is the logarithm of
measured over predicted seconds, added to the error of the layout that it was predicted from. So all
errors are relative to the first layout.

One comparison may be of a slow hour or a slow worker. So the error of a layout that was compared n
times counts with a weight of n / (n + 1), and the mean error of all layouts with the rest, as in
estimates that shrink to the mean (Efron and Morris, 1973). For a layout that was never compared,
that is the mean alone. A correction is at most a factor of `MOST`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log
from statistics import mean

from elastic.geometry.layout import Layout
from elastic.geometry.training_job import Corrections

NUM_RECENT = 32
NUM_COMPARED = 16
MOST = 1.5
NUM_LAYOUTS = 64
MOST_COUNTED = 8
"""Later comparisons of a layout have the weight of one in this many: machines change."""


@dataclass(frozen=True, slots=True)
class LayoutError:
    """The mean error of `count` predictions for a layout."""

    layout: Layout
    error: float = 0.0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Expected:
    """What the model predicts for a layout, and what `factor` of it is a correction; `origin` is
    the layout that it was predicted from."""

    layout: Layout
    seconds: float
    factor: float
    origin: LayoutError


@dataclass(slots=True)
class MeasuredSteps:
    """The latest steps of one layout, in seconds each, and the errors of predictions so far."""

    layout: Layout | None = None
    shares: tuple[int, ...] = ()
    """As in `Assignment`."""
    recent_s: list[float] = field(default_factory=list)
    expected: Expected | None = None
    """Until the layout has been compared."""
    errors: list[LayoutError] = field(default_factory=list)
    """The newest last."""

    def median_s(self) -> float:
        """Median step time, 0 if no step was timed."""
        times = sorted(self.recent_s)
        return times[len(times) // 2] if times else 0.0

    def note(self, layout: Layout | None, step_s: float, shares: tuple[int, ...] = ()) -> None:
        """Note a step; those of another layout, or with other shares, are dropped."""
        if (layout, shares) != (self.layout, self.shares):
            self.layout, self.shares, self.recent_s = layout, shares, []
        self.recent_s = [*self.recent_s[1 - NUM_RECENT :], step_s]

    def expect(self, layout: Layout, seconds: float) -> None:
        """Compare this corrected prediction with steps under the layout once there are enough; 0 is
        none."""
        self.expected = None
        if self.layout is not None and layout != self.layout and seconds > 0:
            origin = self._known(self.layout) or LayoutError(self.layout)
            factor = self.corrections().of(layout)
            self.expected = Expected(layout, seconds, factor, origin)

    def compare(self) -> Expected | None:
        """The prediction for the present layout if enough steps are timed now; its error is
        noted."""
        expected, measured_s = self.expected, self.median_s()
        if expected is None or expected.layout != self.layout or self.shares:
            return None  # the model deals microbatches evenly
        if len(self.recent_s) < NUM_COMPARED or not measured_s > 0:
            return None
        self.expected = None
        if not self.errors:
            self.errors = [expected.origin]
        error = expected.origin.error + log(measured_s * expected.factor / expected.seconds)
        latest = LayoutError(expected.layout, error)
        if known := self._known(expected.layout):
            count = min(known.count + 1, MOST_COUNTED)
            latest = LayoutError(known.layout, known.error + (error - known.error) / count, count)
        others = [other for other in self.errors if other.layout != latest.layout]
        self.errors = [*others[1 - NUM_LAYOUTS :], latest]
        return expected

    def corrections(self) -> Corrections:
        """Factors of predictions from the present layout."""
        if not self.errors or self.layout is None:
            return Corrections()
        usual = mean(known.error for known in self.errors)

        def estimate(known: LayoutError) -> float:
            return (known.count * known.error + usual) / (known.count + 1)

        present = self._known(self.layout)
        level = usual if present is None else estimate(present)
        factors = [(known.layout, _bounded(estimate(known) - level)) for known in self.errors]
        return Corrections(tuple(factors), _bounded(usual - level))

    def _known(self, layout: Layout) -> LayoutError | None:
        return next((known for known in self.errors if known.layout == layout), None)


def _bounded(error: float) -> float:
    return min(MOST, max(1 / MOST, exp(error)))
