"""How a simulated worker brings its snapshots to keepers: as `actors/snapshots.py` does."""

from __future__ import annotations

from copy import deepcopy

from sim.control import Control
from sim.keeper import SimKeeper
from sim.lineage import Part
from sim.timeline import Body

from elastic.commands import Protect
from elastic.keeping import Keeper


class Snapshots:
    """One worker's snapshots: begun after an apply, whole before the next vote."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._keepers: tuple[Keeper, ...] = ()
        self._generation = 0
        self._newest = -1
        self.is_asked_for = False

    def obey(self, order: Protect) -> None:
        self._generation = order.generation
        self._keepers = order.keepers[order.workers.index(self._control.name)]
        self._newest, self.is_asked_for = -1, True

    def take(self, part: Part, every: int) -> None:
        """Begin one if it is due: it arrives at one keeper after the other."""
        step, generation = part.lineage.step, part.assignment.generation
        if self._generation != generation or (self._newest >= 0 and step % every):
            return
        around, name = self._control.around, self._control.name
        self._newest, self._pending = step, len(self._keepers)
        copy, training = deepcopy(part), self._control.training
        delay_s = 0.0
        for number, keeper in enumerate(self._keepers):
            there = around.keepers.get(keeper.node)
            if there is None or there.keeper != keeper:
                self._pending -= 1
                continue
            there.begin(name, generation)
            delay_s += around.draw(0.002, 0.03)

            def arrive(there: SimKeeper = there, first: bool = number == 0) -> None:
                """The worker copies to the first itself, that one sends it on."""
                if self._newest != step or (first and training.ended):
                    return
                if around.keepers.get(there.keeper.node) is there:
                    there.put(name, copy)
                self._pending -= 1

            around.timeline.after(delay_s, arrive)

    def wait(self) -> Body:
        """Before a vote, for what is under way."""
        while self._newest >= 0 and self._pending > 0:
            yield from self._control.work(0.003)

    @property
    def are_whole(self) -> bool:
        return self.is_asked_for and (not self._keepers or self._newest >= 0)
