"""How a simulated worker brings its snapshots to keepers: as `actors/snapshots.py` does."""

from __future__ import annotations

from copy import deepcopy

from sim.control import Control
from sim.keeper import SimKeeper
from sim.lineage import Part
from sim.timeline import Body

from elastic.commands import Protect
from elastic.keeping import Keeper

PATIENCE_S = 1.0


class Snapshots:
    """One worker's snapshots: begun after an apply, whole before the next vote."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._order: Protect | None = None
        self._part: Part | None = None
        self._safe_step = -1
        self._pending = 0
        self._missed = 0

    def obey(self, order: Protect) -> None:
        self._order = order

    def end_generation(self) -> None:
        self._order = self._part = None
        self._safe_step = -1

    @property
    def are_whole(self) -> bool:
        return self._part is not None and not self._pending and not self._missed

    def note(self, num_whole: int, num_members: int) -> None:
        """What a vote has told: that step is kept until another is whole everywhere."""
        if self._part and num_whole == num_members:
            self._safe_step = self._part.lineage.step

    def take(self, part: Part, every: int) -> None:
        """Begin one if it is due: it arrives at one keeper after the other."""
        order, self._part = self._order, None
        step, generation = part.lineage.step, part.assignment.generation
        if order is None or order.generation != generation:
            return
        around, name = self._control.around, self._control.name
        keepers: tuple[Keeper, ...] = order.keepers[order.workers.index(name)]
        if not keepers or step % every:
            return
        self._part, self._taken_for = part, order
        self._pending, self._missed = len(keepers), 0
        copy, training, delay_s = deepcopy(part), self._control.training, 0.0
        for number, keeper in enumerate(keepers):
            there = around.keepers.get(keeper.node)
            if there is None or there.keeper != keeper:
                self._pending -= 1
                self._missed += 1
                continue
            there.begin(name, generation, self._safe_step)
            delay_s += around.draw(0.002, 0.03)

            def arrive(there: SimKeeper = there, first: bool = number == 0) -> None:
                """The worker copies to the first itself, that one sends it on."""
                if self._part is not part or order is not self._taken_for:
                    return
                if first and training.ended:
                    return
                self._pending -= 1
                if around.keepers.get(there.keeper.node) is there:
                    there.put(name, copy)
                else:
                    self._missed += 1

            around.timeline.after(delay_s, arrive)

    def wait(self) -> Body:
        """Before a vote, for what is under way; where a keeper is gone, for another one."""
        deadline = self._control.around.timeline.now + PATIENCE_S
        while self._part and not self.are_whole and self._control.around.timeline.now < deadline:
            yield from self._control.work(0.003)
            if self._missed and self._order is not self._taken_for:
                self.take(self._part, 1)
