"""How a simulated worker sends its snapshots to snapshot servers."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from random import Random

from sim.control import Control
from sim.lineage import Part
from sim.parity import chunk_of
from sim.snapshot_server import SimSnapshotServer
from sim.timeline import Body

from elastic.protocol.commands import StartSnapshots
from elastic.protocol.snapshot_events import SnapshotTimed
from elastic.reshard.snapshot_interval import interval_for
from elastic.reshard.snapshot_placement import SnapshotServer

PATIENCE_S = 1.0


class Snapshots:
    """One worker's snapshots: begun after an apply, whole before the next vote."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._order: StartSnapshots | None = None
        self._taken_for: StartSnapshots | None = None
        self._part: Part | None = None
        self._safe_step = -1
        self._pending = 0
        self._missed = 0

    def obey(self, order: StartSnapshots) -> None:
        self._order = order

    def end_generation(self) -> None:
        self._order = self._part = None
        self._safe_step = -1

    @property
    def are_whole(self) -> bool:
        return self._part is not None and not self._pending and not self._missed

    @property
    def whole_order(self) -> int | None:
        whole = self._taken_for if self.are_whole else None
        return whole.num_changes if whole else None

    def note(self, num_whole: int, num_members: int) -> None:
        """Note a vote's result: the step is kept until another is whole everywhere."""
        if self._part and num_whole == num_members:
            self._safe_step = self._part.lineage.step
            self._check_parities(self._safe_step)

    def take(self, part: Part, every: int) -> None:
        """Begin a snapshot if it is due: it arrives at one snapshot server after the other."""
        order, self._part = self._order, None
        step, generation = part.lineage.step, part.assignment.generation
        if order is None or order.generation != generation:
            return
        around, name = self._control.around, self._control.name
        snapshot_servers: tuple[SnapshotServer, ...] = order.snapshot_servers[
            order.workers.index(name)
        ]
        if not snapshot_servers or step % (order.every or every):
            return
        self._part, self._taken_for = part, order
        self._time(order, step)
        mates = dict(self._mates(order))
        self._pending, self._missed = len(snapshot_servers) + len(mates), 0
        copy, training, delay_s = deepcopy(part), self._control.training, 0.0
        for number, snapshot_server in enumerate(snapshot_servers):
            server = self._reachable(snapshot_server)
            if server is None:
                self._pending -= 1
                self._missed += 1
                continue
            server.begin(name, generation, self._safe_step)
            delay_s += around.draw(0.002, 0.03)

            def arrive(server: SimSnapshotServer = server, first: bool = number == 0) -> None:
                """The worker copies to the first server itself; that one forwards it."""
                if self._part is not part or order is not self._taken_for:
                    return
                if first and training.ended:
                    return
                if (
                    server.is_frozen
                    and around.snapshot_servers.get(server.snapshot_server.node) is server
                ):
                    around.timeline.after(0.05, lambda: arrive(server, first))
                    return
                self._pending -= 1
                if around.snapshot_servers.get(server.snapshot_server.node) is server:
                    server.put(name, copy)
                else:
                    self._missed += 1

            around.timeline.after(delay_s, arrive)
        for mate, snapshot_server in mates.items():
            self._spread(order, copy, part, snapshot_servers[0], mate, snapshot_server, delay_s)
            delay_s += around.draw(0.002, 0.02)

    def _time(self, order: StartSnapshots, step: int) -> None:
        """Sometimes report a cost that calls for another interval, if that is `auto`."""
        random = Random(f"{self._control.name}/{order.generation}/{step}")
        share = random.choice((0.0, 0.0, 0.015, 0.03, 0.06))
        is_other = order.every and interval_for(share, order.every) != order.every
        if is_other and random.random() < 0.3:
            self._control.report(SnapshotTimed(self._control.name, order.generation, share))

    def wait(self) -> Body:
        """Wait for the current snapshot before a vote; if a server is gone, send it to another."""
        deadline = self._control.around.timeline.now + PATIENCE_S
        while self._part and not self.are_whole and self._control.around.timeline.now < deadline:
            yield from self._control.work(0.003)
            if self._missed and self._order is not self._taken_for:
                self.take(self._part, 1)

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
        order: StartSnapshots,
        copy: Part,
        part: Part,
        local: SnapshotServer,
        mate: str,
        snapshot_server: SnapshotServer,
        delay_s: float,
    ) -> None:
        """The worker's snapshot server sends a chunk to another member's, even if the worker has
        died. If either server dies meanwhile, half of the chunk has arrived."""
        around, name = self._control.around, self._control.name
        [members] = [workers for workers in order.sets if name in workers]
        generation, step = copy.assignment.generation, copy.lineage.step
        kept_step = self._safe_step

        def note(is_taken: bool) -> None:
            if self._part is part and order is self._taken_for:
                self._pending -= 1
                self._missed += not is_taken

        def begin() -> None:
            local_server, mate_server = self._reachable(local), self._reachable(snapshot_server)
            if not local_server or not mate_server or not local_server.has(name, copy):
                note(is_taken=False)
            elif mate_server.parity(members, mate, generation).begin(name, step, kept_step):
                around.timeline.after(around.draw(0.001, 0.02), end)
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
        order, name = self._taken_for, self._control.name
        assert order
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
