"""What `--profile` says: which steps to keep a trace of."""

from __future__ import annotations

import re

from pipelines.errors import UserError


def parse_profile(text: str) -> tuple[int, int]:
    """The first and the last step of `steps=10:13`; `steps=10` is that one. Raises `UserError`."""
    found = re.fullmatch(r"steps=(\d+)(?::(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise UserError(
            f"--profile {text}: write the first and the last step, from 1, e.g. steps=10:13"
        )
    return first, last
