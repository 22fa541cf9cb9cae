"""How a simulated worker sends its snapshots to snapshot servers."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from random import Random

from sim.control import Control
from sim.lineage import Part
from sim.parity import chunk_of
from sim.snapshot_server import SimSnapshotServer
from sim.timeline import Body

from actors.snapshots.snapshot_cost import SnapshotCost
from elastic.protocol.commands import StartSnapshots
from elastic.protocol.snapshot_events import SnapshotTimed
from elastic.reshard.snapshot_interval import AUTO_EVERY, MARGIN, interval_for
from elastic.reshard.snapshot_placement import SnapshotServer

PATIENCE_S = 1.0


@dataclass
class Taken:
    """A snapshot that has begun."""

    copy: Part
    order: StartSnapshots
    began_s: float
    num_pending: int
    num_missed: int = 0
    took_s: float = 0.0

    @property
    def is_whole(self) -> bool:
        return not self.num_pending and not self.num_missed

    @property
    def step(self) -> int:
        return self.copy.lineage.step


class Snapshots:
    """One worker's snapshots: like `actors.snapshots.worker_snapshots.Snapshots`."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._cost = SnapshotCost(lambda: control.around.timeline.now)
        self._order: StartSnapshots | None = None
        self._noted: StartSnapshots | None = None
        self._timed: StartSnapshots | None = None
        self._taken: Taken | None = None
        self._safe_step = self._due_step = self._held_step = -1
        self._is_patient = True

    def obey(self, order: StartSnapshots) -> None:
        self._order = order

    def end_generation(self) -> None:
        self._order = self._noted = self._taken = None
        self._safe_step = self._due_step = self._held_step = -1
        self._is_patient = True
        self._cost.end_generation()

    @property
    def whole_order(self) -> int | None:
        taken = self._taken
        is_counted = taken and taken.is_whole and taken.step == self._due_step
        if not taken or not is_counted or taken.order is not self._noted:
            return None
        return taken.order.num_changes

    def note(self, num_whole: int, num_members: int) -> None:
        """Note a vote's result: the step is kept until another is whole everywhere."""
        if num_whole == num_members:
            self._safe_step = self._due_step
            self._check_parities(self._safe_step)

    def take(self, part: Part, every: int) -> None:
        """A step boundary: begin a snapshot if one is due and no older one is under way."""
        self._held_step = part.lineage.step
        self._cost.end_step()
        self._report_cost(every)
        with self._cost.spending():
            self._begin(part, every)

    def _begin(self, part: Part, every: int) -> None:
        """The snapshot arrives at one snapshot server after the other."""
        order = self._order
        step, generation = part.lineage.step, part.assignment.generation
        if order is None or order.generation != generation:
            return
        self._noted = order
        if step % (order.every or every):
            return
        self._due_step = step
        if self._taken and self._taken.order is order:
            if self._taken.num_pending:
                return
            if self._taken.is_whole:
                self._cost.note_copied(self._taken.took_s)
        else:
            self._cost.forget_snapshots()
        around, name = self._control.around, self._control.name
        snapshot_servers: tuple[SnapshotServer, ...] = order.snapshot_servers[
            order.workers.index(name)
        ]
        if not snapshot_servers:
            self._taken = None
            return
        self._report_drawn_cost(order, step)
        mates = dict(self._mates(order))
        num_pending = len(snapshot_servers) + len(mates)
        self._taken = taken = Taken(deepcopy(part), order, around.timeline.now, num_pending)
        self._cost.note_begun()
        training, delay_s = self._control.training, 0.0
        for number, snapshot_server in enumerate(snapshot_servers):
            server = self._reachable(snapshot_server)
            if server is None:
                self._note_arrival(taken, is_taken=False)
                continue
            server.begin(name, generation, self._safe_step)
            delay_s += around.draw(*around.snapshot_s)

            def arrive(server: SimSnapshotServer = server, first: bool = number == 0) -> None:
                """The worker copies to the first server itself; that one forwards it."""
                if self._taken is not taken or (first and training.ended):
                    return
                is_there = around.snapshot_servers.get(server.snapshot_server.node) is server
                if server.is_frozen and is_there:
                    around.timeline.after(0.05, lambda: arrive(server, first))
                    return
                if is_there:
                    server.put(name, taken.copy)
                self._note_arrival(taken, is_taken=is_there)

            around.timeline.after(delay_s, arrive)
        for mate, snapshot_server in mates.items():
            self._spread(taken, snapshot_servers[0], mate, snapshot_server, delay_s)
            delay_s += around.draw(*around.snapshot_s)

    def _note_arrival(self, taken: Taken, is_taken: bool) -> None:
        if self._taken is taken:
            taken.num_pending -= 1
            taken.num_missed += not is_taken
            taken.took_s = self._control.around.timeline.now - taken.began_s

    def _report_cost(self, every: int) -> None:
        """Report once for each order if copies call for another interval than a fixed one."""
        order = self._order
        if order is None or not self._taken or self._taken.order is not order:
            return
        is_longer = (order.every or every) > every
        num_steps = self._cost.num_steps(PATIENCE_S / (MARGIN if is_longer else 1.0))
        if every == AUTO_EVERY or num_steps is None or self._timed is order:
            return
        if interval_for(0.0, order.every or every, num_steps, every) != (order.every or every):
            self._timed = order
            self._control.report(
                SnapshotTimed(self._control.name, order.generation, 0.0, num_steps)
            )

    def _report_drawn_cost(self, order: StartSnapshots, step: int) -> None:
        """Sometimes report a cost that calls for another interval, if that is `auto`."""
        if self._control.around.snapshot_every != AUTO_EVERY:
            return
        random = Random(f"{self._control.name}/{order.generation}/{step}")
        share = random.choice((0.0, 0.0, 0.015, 0.03, 0.06))
        is_other = interval_for(share, order.every) != order.every
        if is_other and random.random() < 0.3:
            self._control.report(SnapshotTimed(self._control.name, order.generation, share))

    def wait(self) -> Body:
        """Wait for the current snapshot before a vote; if a server is gone, send it to another."""
        timeline, every = self._control.around.timeline, self._control.around.snapshot_every
        is_in_vain = not self._is_patient or bool(self._cost.num_steps(PATIENCE_S))
        deadline = timeline.now + (0.0 if is_in_vain else PATIENCE_S)
        with self._cost.spending():
            while (taken := self._taken) and not taken.is_whole:
                if timeline.now >= deadline:
                    self._is_patient = False
                    return
                yield from self._control.work(0.003)
                if taken.num_pending or taken.is_whole:
                    continue
                order = self._order
                if taken.step != self._held_step or (order and taken.step % (order.every or every)):
                    return
                if order is not taken.order:
                    self._begin(taken.copy, every)
        self._is_patient = True

    def _mates(self, order: StartSnapshots) -> Iterator[tuple[str, SnapshotServer]]:
        """The other members of the worker's set, each with its snapshot server."""
        for members in order.sets:
            if self._control.name in members:
                for member in members:
                    if member != self._control.name:
                        yield member, order.snapshot_servers[order.workers.index(member)][0]

    def _reachable(self, snapshot_server: SnapshotServer) -> SimSnapshotServer | None:
        server = self._control.around.snapshot_servers.get(snapshot_server.node)
        return (
            server
            if server and server.snapshot_server == snapshot_server and not server.is_frozen
            else None
        )

    def _spread(
        self,
        taken: Taken,
        local: SnapshotServer,
        mate: str,
        snapshot_server: SnapshotServer,
        delay_s: float,
    ) -> None:
        """The worker's snapshot server sends a chunk to another member's, even if the worker has
        died. If either server dies meanwhile, half of the chunk has arrived."""
        around, name, copy = self._control.around, self._control.name, taken.copy
        [members] = [workers for workers in taken.order.sets if name in workers]
        generation, step = copy.assignment.generation, copy.lineage.step
        kept_step = self._safe_step

        def note(is_taken: bool) -> None:
            self._note_arrival(taken, is_taken)

        def begin() -> None:
            local_server, mate_server = self._reachable(local), self._reachable(snapshot_server)
            if not local_server or not mate_server or not local_server.has(name, copy):
                note(is_taken=False)
            elif mate_server.parity(members, mate, generation).begin(name, step, kept_step):
                around.timeline.after(around.draw(*around.snapshot_s), end)
            else:
                note(is_taken=False)

        def end() -> None:
            local_server, mate_server = self._reachable(local), self._reachable(snapshot_server)
            if not local_server or not mate_server:
                note(is_taken=False)
                return
            parity = mate_server.parity(members, mate, generation)
            note(parity.end(name, step, chunk_of(copy, members, name, mate)))

        around.timeline.after(delay_s + 0.0001, begin)

    def _check_parities(self, step: int) -> None:
        """If a vote says that snapshots are whole, all parities of the set exist, unless a server
        died since."""
        assert self._taken
        order, name = self._taken.order, self._control.name
        for members in order.sets:
            snapshot_servers = {
                m: self._reachable(order.snapshot_servers[order.workers.index(m)][0])
                for m in members
            }
            if name not in members or not all(snapshot_servers.values()):
                continue
            for member, snapshot_server in snapshot_servers.items():
                assert snapshot_server
                parity = snapshot_server.parity(members, member, order.generation)
                assert step in parity.whole, f"counted as whole: {member}'s server lacks a parity"
