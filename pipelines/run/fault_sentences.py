"""Parser of the fault sentences of `--inject`, such as `kill worker 3 at step 60`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from actors.runtime.fault_spec import MOMENTS, Action, Fault
from elastic.protocol.events import WorkerDraining
from pipelines.errors import UserError

_ACTIONS: dict[str, Action | None] = {
    "kill": "kill",
    "stop": "stop",
    "hang": "hang",
    "raise in": "raise",
    "remove": None,
    "flip a bit in": "flip",
    "nan in": "nan",
    "slow link of": "slow_link",
    "slow": "slow",
    "ecc error in": "ecc",
}
"""By the words of the sentence; None: the worker is drained."""
_SLOW: tuple[Action, ...] = ("slow", "slow_link")
_OF_MACHINE: tuple[Action, ...] = ("slow_link", "ecc")
"""Faults of the machine, which is checked before the worker trains its first step."""
_SENTENCE = re.compile(
    rf"(?P<action>{'|'.join(_ACTIONS)}) workers? "
    r"(?P<workers>[0-9]{1,9}(?:(?:,| and|, and) [0-9]{1,9})*)"
    r"(?: by (?P<factor>[0-9]{1,9}(?:\.[0-9]{1,9})?)x)?"
    r"(?: (?:in|while|in the) (?P<moment>[a-z-]+))?"
    r"(?: (?:at|of|in|before|after) step (?P<step>[0-9]{1,12}))?"
)
_MOMENTS = {moment.replace("_", "-"): moment for moment in MOMENTS}
"""Moments as the sentences name them."""
EXAMPLES = (
    "kill worker 3 at step 60; kill workers 1 and 2 in vote at step 80; stop worker 0 at step 20; "
    "remove worker 2 at step 40; kill worker 1 while forming before step 61; "
    "flip a bit in worker 1 at step 7; nan in worker 1 at step 9; slow worker 2 by 3x at step 30; "
    "slow link of worker 2 by 10x; ecc error in worker 1"
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
        action = _ACTIONS[match["action"]] if match else None
        needs_step = action not in _OF_MACHINE
        is_complete = match is not None and (action == "ecc" or needs_step == bool(match["step"]))
        if match is None or moment is None or not is_complete:
            raise UserError(
                f"--inject {sentence!r} is not understood; write e.g. {EXAMPLES} "
                f"(moments: {', '.join(_MOMENTS)})"
            )
        step, factor = int(match["step"] or 0), float(match["factor"] or 1.0)
        if (action in _SLOW) != (factor > 1.0) or (match["factor"] and factor <= 1.0):
            raise UserError(
                f"--inject {sentence!r}: `slow` needs a factor over 1, other faults take none: "
                "slow worker 2 by 3x at step 30"
            )
        if action in ("flip", "nan", *_SLOW, *_OF_MACHINE) and moment != "compute":
            raise UserError(
                f"--inject {sentence!r}: this fault only happens in compute; leave out the moment"
            )
        for number in re.findall(r"\d+", match["workers"]):
            if action is None:
                draining_workers.append(
                    (step, WorkerDraining(f"w{number}", "requested by --inject"))
                )
            else:
                faults.append(Fault(action, f"w{number}", step, moment, factor))
    return tuple(faults), tuple(draining_workers)
