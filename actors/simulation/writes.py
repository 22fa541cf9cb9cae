"""The writing of checkpoints by a simulated gang, beside training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from actors.simulation.cluster import LATENCY_S, SimulatedCluster
from actors.simulation.timeline import Timeline
from elastic.geometry.training_job import Job
from elastic.protocol.commands import RequestCheckpoint
from elastic.protocol.events import Event, PartFile, PartWritten
from elastic.simulation.costs import Costs


class CheckpointWrites:
    """Each member writes its part of a step; one checkpoint at a time."""

    def __init__(
        self,
        timeline: Timeline,
        costs: Costs,
        job: Job,
        cluster: SimulatedCluster,
        post: Callable[[Event], None],
    ) -> None:
        self.is_new = False
        """Whether the writing began with the newest step: it slows down the next one."""
        self.begun_step = -1
        self._timeline, self._costs, self._job = timeline, costs, job
        self._cluster, self._post = cluster, post
        self._request: RequestCheckpoint | None = None
        self._generation = 0
        self._under_way = 0
        self._turn = 0

    @property
    def is_busy(self) -> bool:
        return self._under_way > 0

    @property
    def is_requested(self) -> bool:
        """Whether a request of this generation waits for a step that is not saved yet."""
        request = self._request
        return (
            request is not None
            and request.generation >= self._generation
            and request.step >= self.begun_step
        )

    def request(self, order: RequestCheckpoint) -> None:
        self._request = order

    def begin_generation(self, generation: int) -> None:
        """Parts of the generation before are written to their end, but no step waits for them."""
        self._generation, self._under_way = generation, 0
        self._turn += 1

    def begin(self, workers: Sequence[str], step: int, generation: int) -> float:
        """Begin to write a step; returns the seconds until its parts are durable."""
        part_bytes = self._job.state_bytes // max(1, len(workers))
        seconds = LATENCY_S + part_bytes / self._costs.storage_bytes_per_s
        self.begun_step, self.is_new = step, True
        self._under_way += 1
        end = partial(self._end, tuple(workers), step, generation, part_bytes, self._turn)
        self._timeline.after(seconds, end)
        return seconds

    def _end(
        self, workers: tuple[str, ...], step: int, generation: int, part_bytes: int, turn: int
    ) -> None:
        if turn == self._turn:
            self._under_way -= 1
        parts = tuple(
            (worker.name, PartFile(f"part-{worker.name}", part_bytes, 0))
            for worker in self._cluster.alive(workers)
        )
        if parts:  # one event, as the shell joins reports that arrive together
            (name, file), *others = parts
            self._post(PartWritten(name, generation, step, file, tuple(others)))
