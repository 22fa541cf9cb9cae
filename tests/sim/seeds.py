"""Seeds kept for ever: each has shown what a core does wrong that lacks one line of it."""

KEPT = {
    0: "resumed before all state was there",
    2: "counted a dead worker as a holder",
    10: "forgot a part that had overtaken the report of its step",
    11: "did not take over the records of a worker that had unwound",
    44: "aborted once more while it aborted",
    46: "expected parts of a generation that was broken off",
    58: "took a complete run that was lost before it was saved for complete",
    77: "took a part of a broken attempt for one of the last checkpoint",
    106: "moved state before all groups were formed",
    123: "forgot what a broken re-layout had already moved",
    133: "did not settle a vote that had been seen",
    239: "kept a worker whose apply broke half-way",
    278: "went on from a pause whose last report was lost",
    398: "published a checkpoint of a step whose report was lost",
    470: "forgot a part that arrived during the abort",
    630: "went back to an older assignment after a commit under the new one",
    745: "settled a vote of a history that had been given up",
    1298: "waited for ever for workers that were not to come",
}

KEPT_WITH_BAD_NUMBERS = {
    12488: "waited, about to end, for workers that such a run does not start",
}

KEPT_DRAINS = {
    3278: "counted a leaver that had given all as a holder under the assignment after it",
}
"""Likewise, of scenarios with notices."""

KEPT_PARITIES = {
    1180: "told of other sets at each keeper that started: three changes within a step",
    4933: "forgot, as it saved, where the state had been before it was moved",
}
"""Likewise, of scenarios with parities."""

KEPT_CONTROLLER = {
    2: "waited for ever for a checkpoint that was not published again",
    6: "took an order twice",
    37: "lacked the line of a step that had committed",
    44: "did not hear again who was ready",
    47: "did not send again what had not arrived",
    76: "gave up the last checkpoint for its own absence",
    515: "dropped the checkpoint that it had just published",
    4421: "added a line of metrics after that of the same step done again",
}
"""The same, of scenarios in which the controller dies."""
