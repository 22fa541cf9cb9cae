"""Seeds that have found something, kept for ever, and what each of them found."""

KEPT: dict[int, str] = {}
