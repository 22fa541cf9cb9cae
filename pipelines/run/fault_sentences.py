"""Parser of the fault sentences of `--inject`, such as `kill worker 3 at step 60`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import cast

from actors.runtime.fault_spec import MOMENTS, Action, Fault
from elastic.protocol.events import WorkerDraining
from pipelines.errors import UserError

_SENTENCE = re.compile(
    r"(?P<action>kill|stop|hang|raise in|remove|flip a bit in|nan in|slow) workers? "
    r"(?P<workers>[0-9]{1,9}(?:(?:,| and|, and) [0-9]{1,9})*)"
    r"(?: by (?P<factor>[0-9]{1,9}(?:\.[0-9]{1,9})?)x)?"
    r"(?: (?:in|while|in the) (?P<moment>[a-z-]+))?"
    r" (?:at|of|in|before|after) step (?P<step>[0-9]{1,12})"
)
_MOMENTS = {moment.replace("_", "-"): moment for moment in MOMENTS}
"""Moments as the sentences name them."""
EXAMPLES = (
    "kill worker 3 at step 60; kill workers 1 and 2 in vote at step 80; stop worker 0 at step 20; "
    "remove worker 2 at step 40; kill worker 1 while forming before step 61; "
    "flip a bit in worker 1 at step 7; nan in worker 1 at step 9; slow worker 2 by 3x at step 30"
)


def parse_faults(
    sentences: Iterable[str],
) -> tuple[tuple[Fault, ...], tuple[tuple[int, WorkerDraining], ...]]:
    """The faults that workers inject into themselves, and the workers to drain after given steps.

    Worker 3 is the one named w3; replacements get new numbers. Raises `UserError` for a sentence
    that does not parse.
    """
    faults: list[Fault] = []
    draining_workers: list[tuple[int, WorkerDraining]] = []
    for sentence in sentences:
        match = _SENTENCE.fullmatch(" ".join(sentence.lower().split()))
        moment = _MOMENTS.get(match["moment"] or "compute") if match else None
        if match is None or moment is None:
            raise UserError(
                f"--inject {sentence!r} is not understood; write e.g. {EXAMPLES} "
                f"(moments: {', '.join(_MOMENTS)})"
            )
        step, action = int(match["step"]), match["action"].split()[0]
        factor = float(match["factor"] or 1.0)
        if (action == "slow") != (factor > 1.0) or (match["factor"] and factor <= 1.0):
            raise UserError(
                f"--inject {sentence!r}: `slow` needs a factor over 1, other faults take none: "
                "slow worker 2 by 3x at step 30"
            )
        if action in ("flip", "nan", "slow") and moment != "compute":
            raise UserError(
                f"--inject {sentence!r}: this fault only happens in compute; leave out the moment"
            )
        for number in re.findall(r"\d+", match["workers"]):
            if action == "remove":
                draining_workers.append(
                    (step, WorkerDraining(f"w{number}", "requested by --inject"))
                )
            else:
                faults.append(Fault(cast(Action, action), f"w{number}", step, moment, factor))
    return tuple(faults), tuple(draining_workers)
