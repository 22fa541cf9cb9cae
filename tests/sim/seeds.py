"""Seeds that are kept for ever: each has revealed a defect of a core that lacked one line."""

KEPT = {
    0: "resumed before all state was there",
    2: "counted a dead worker as a holder",
    10: "forgot a part that had overtaken the report of its step",
    11: "ignored the records of a worker that had unwound",
    44: "aborted again during an abort",
    46: "expected parts of an aborted generation",
    58: "completed a run whose state was lost before it was saved",
    77: "counted a part of a failed attempt for the last checkpoint",
    106: "moved state before all groups were formed",
    123: "forgot what an aborted reshard had already moved",
    133: "did not roll forward to a vote that had been seen",
    239: "kept a worker whose apply broke half-way",
    278: "continued after a pause whose last report was lost",
    398: "published a checkpoint of a step whose report was lost",
    470: "forgot a part that arrived during the abort",
    630: "returned to an older assignment after a commit under the new one",
    745: "rolled forward to a vote of an abandoned lineage",
    1298: "waited for ever for workers that would not arrive",
}

KEPT_WITH_BAD_NUMBERS = {
    12488: "waited for workers although an ending run starts none",
}

KEPT_DRAINS = {
    3278: "counted a drained worker that had sent everything as a holder under the next assignment",
}
"""The same, of scenarios with notices."""

KEPT_PARITIES = {
    1180: "ordered new sets for each snapshot server that started: three changes within a step",
    4933: "forgot during the last save who held the state before the reshard",
}
"""The same, of scenarios with parities."""

KEPT_CONTROLLER = {
    2: "waited for ever for a checkpoint that was not published again",
    6: "handled an order twice",
    37: "lacked the line of a committed step",
    44: "did not receive repeated reports of ready workers",
    47: "did not resend commands that had not arrived",
    76: "gave up the last checkpoint because of its own absence",
    515: "removed the checkpoint that it had just published",
    4421: "added a line of metrics after that of the recomputed step",
}
"""The same, of scenarios in which the controller dies."""
