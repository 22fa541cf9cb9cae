"""The machines that a simulated run pays for, by market."""

from __future__ import annotations

from collections import defaultdict


class MachineHours:
    """Seconds of machines between the start of their first worker and their release."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[str, float]] = {}
        """By machine in use, its market and since when it is paid for."""
        self._ended: defaultdict[str, float] = defaultdict(float)

    def begin(self, node: str, market: str, now: float) -> None:
        """A worker starts on a machine; it may have others already."""
        self._since.setdefault(node, (market, now))

    def end(self, node: str, now: float) -> None:
        """A machine is released, or gone."""
        if node in self._since:
            market, since = self._since.pop(node)
            self._ended[market] += now - since

    def seconds(self, market: str, now: float) -> float:
        """The seconds of all machines of a market up to now."""
        using = sum(now - since for kind, since in self._since.values() if kind == market)
        return self._ended[market] + using
