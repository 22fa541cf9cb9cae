"""The status of a run as `elastic status` shows it: a page and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipelines.observe.history.formatting import by_number, duration, shortened
from pipelines.observe.history.goodput import TimeSplit
from pipelines.observe.history.history import History
from pipelines.observe.history.run_events import RunEvent
from pipelines.observe.view.facts import ago, events_table, speed, step_parts, steps, world

NUM_EVENTS = 10
MAX_WORKERS_SHOWN = 40
NODE_LENGTH = 16


@dataclass(frozen=True)
class RunStatus:
    """The status of a run at `now` (seconds since the epoch).

    `owner` is the driver that its lease names, or None. `prices` are the prices of a worker-hour by
    place; the empty name is for all other places.
    """

    name: str
    url: str
    now: float
    history: History
    owner: Mapping[str, Any] | None = None
    prices: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_driven(self) -> bool:
        return self.owner is not None and self.history.membership.outcome is None

    @property
    def phase(self) -> str:
        """The phase in a word or two, with the reason if the run is waiting."""
        membership = self.history.membership
        if membership.outcome:
            return membership.outcome
        if self.is_driven:
            return membership.phase
        return "not driven" if membership.sessions else "not begun"

    @property
    def split(self) -> TimeSplit:
        return self.history.account.split(self._until)

    def worker_hours(self) -> list[dict[str, Any]]:
        """Worker-hours by place, most first; `cost` is None without a price."""
        rows = []
        for place, spent_s in self.history.account.workers.by_place(self._until).items():
            hours, price = spent_s / 3600, self.prices.get(place, self.prices.get(""))
            cost = None if price is None else hours * price
            rows.append({"place": place, "hours": hours, "cost": cost})
        return rows

    def workers(self) -> list[dict[str, Any]]:
        """Members in world-rank order, then standby workers, then starting workers."""
        membership = self.history.membership
        if not self.is_driven:
            return []
        rows = [
            _worker(self.history, worker, "member", world_rank)
            for world_rank, worker in enumerate(membership.ranked)
            if worker in membership.members
        ]
        for role, workers in (("standby", membership.standbys), ("starting", membership.starting)):
            names = sorted(workers, key=by_number)
            rows += [_worker(self.history, worker, role) for worker in names]
        return rows

    def quarantined_nodes(self) -> list[dict[str, Any]]:
        """Nodes on which no worker is started, and until when."""
        quarantined = self.history.membership.quarantined if self.is_driven else {}
        return [{"node": node, "until": until} for node, until in sorted(quarantined.items())]

    def checkpoint(self) -> RunEvent | None:
        """The event of the newest complete checkpoint."""
        return self.history.membership.last("checkpoint")

    def as_json(self) -> dict[str, Any]:
        """The keys that docs/files.md lists, which other programs rely on."""
        membership, progress = self.history.membership, self.history.progress
        checkpoint, split = self.checkpoint(), self.split
        owner = self.owner if self.is_driven else None
        return {
            "run": self.name,
            "folder": self.url,
            "time": self.now,
            "phase": self.phase,
            "reason": self._reason(),
            "outcome": membership.outcome,
            "driver": owner and {key: owner.get(key) for key in ("host", "pid", "cluster")},
            "step": membership.step,
            "total_steps": membership.total_steps,
            "loss": progress.loss,
            "reported": progress.reported,
            "num_skipped": progress.num_skipped,
            "num_evaluations_not_finite": membership.num_not_finite,
            "tokens_per_s": progress.tokens_per_s,
            "unit": progress.unit,
            "steps_per_s": progress.steps_per_s,
            "step_time": self._step_time(),
            "layout": membership.layout,
            "generation": membership.generation,
            "max_workers": membership.max_workers,
            "workers": self.workers(),
            "quarantined_nodes": self.quarantined_nodes(),
            "checkpoint": checkpoint and {"step": checkpoint.step, "time": checkpoint.time},
            "events": [
                {"time": h.time, "kind": h.kind, "step": h.step, "text": h.text}
                for h in membership.run_events[-NUM_EVENTS:]
            ],
            "goodput": {"goodput": split.goodput, "wall_s": split.wall_s, **asdict(split)},
            "worker_hours": self.worker_hours(),
        }

    def _step_time(self) -> dict[str, Any]:
        """The time split of the newest steps and of the whole run, with the speed of a device."""
        account = self.history.step_time
        recent, run = (
            {**asdict(times), **account.device.speed(times)}
            for times in (account.recent, account.run)
        )
        return {"recent": recent, "run": run if account.is_whole else None}

    def page(self) -> RenderableType:
        """The page for a terminal of any width, or a file."""
        where = Text(f"{self.url}\n{self._driver()}", style="dim")
        parts: list[RenderableType] = [self._headline(), where, Text()]
        for table in (self._facts(), self._workers_table(), self._time_table()):
            parts += [table, Text()] if table.row_count else []
        recent = self.history.membership.run_events[-NUM_EVENTS:]
        return Group(*parts, events_table(recent, self.now))

    @property
    def _until(self) -> float | None:
        """Until when time counts: a run without a driver spends none after its last line."""
        return self.now if self.is_driven else None

    def _reason(self) -> str:
        membership = self.history.membership
        if membership.outcome:
            end = membership.last("stopped")
            return end.cause if end else ""
        _, colon, reason = self.phase.partition(": ")
        return reason if colon else ""

    def _headline(self) -> Text:
        phase = shortened(self.phase, 60)
        style = "green" if self.phase in ("training", "completed") else "yellow"
        line = Text(self.name, style="bold").append(" · ").append(phase, style=style)
        reason = self._reason()
        if self.history.membership.outcome and reason:
            line.append(f": {shortened(reason, 200)}")
        return line

    def _driver(self) -> str:
        sessions = self.history.membership.sessions
        if self.is_driven and self.owner:
            cluster = self.owner.get("cluster")
            driver = f"driven by process {self.owner.get('pid')} on {self.owner.get('host')}"
            return driver + (f", Ray cluster {cluster}" if cluster else "")
        if not sessions:
            return "not started yet"
        if self.history.membership.outcome:
            return f"ended {ago(sessions[-1].end, self.now)}"
        last_line = ago(sessions[-1].end, self.now)
        return f"not driven, last line {last_line}; use the same run name to resume it"

    def _facts(self) -> Table:
        history = self.history
        table = _grid()
        is_training = self.is_driven and history.membership.phase == "training"
        progress = steps(history)
        table.add_row("step", progress if is_training else progress.partition(" · ")[0])
        if history.progress.loss is not None:
            table.add_row("loss", f"{history.progress.loss:.4f}")
        if history.progress.reported:
            table.add_row("reported", history.progress.reported_text)
        if rate := speed(history):
            table.add_row("speed" if is_training else "last speed", rate)
        if parts := step_parts(history.step_time.recent):
            table.add_row("step time", parts)
            if history.step_time.is_whole:
                table.add_row("whole run", step_parts(history.step_time.run))
        if self.is_driven:
            table.add_row("workers", world(history.membership))
        elif history.membership.layout:
            table.add_row("last layout", history.membership.layout)
        for row in self.quarantined_nodes():
            remaining = duration(max(0.0, row["until"] - self.now))
            node = shortened(row["node"], NODE_LENGTH)
            table.add_row("quarantined", f"node {node}, for {remaining} more")
        checkpoint = self.checkpoint()
        newest = "none yet"
        if checkpoint:
            newest = f"step {checkpoint.step:,}, {ago(checkpoint.time, self.now)}"
        table.add_row("checkpoint", newest)
        return table

    def _workers_table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        rows = self.workers()
        dealt = ("microbatches",) if any(row["microbatches"] is not None for row in rows) else ()
        names = ("rank", "worker", "node", "pid", *dealt, "compute", "peak memory", "warm since")
        for name in names if rows else ():
            is_number = name not in ("worker", "node", "warm since")
            table.add_column(justify="right" if is_number else "left", no_wrap=True)
        if rows:
            table.add_row(*names, style="dim")
        for row in rows[:MAX_WORKERS_SHOWN]:
            role = row["role"]
            rank = role if row["world_rank"] is None else str(row["world_rank"])
            where = (
                (shortened(row["node"], NODE_LENGTH), str(row["pid"])) if row["pid"] else ("", "")
            )
            since = ago(row["since"], self.now) if row["since"] else ""
            compute = duration(row["compute_s"]) if row["compute_s"] else ""
            peak = f"{row['peak_bytes'] / 1e6:,.0f} MB" if row["peak_bytes"] else ""
            number = "" if row["microbatches"] is None else str(row["microbatches"])
            shown = (rank, row["worker"], *where, *(number for _ in dealt))
            table.add_row(*shown, compute, peak, since)
        if len(rows) > MAX_WORKERS_SHOWN:
            table.add_row("", f"and {len(rows) - MAX_WORKERS_SHOWN} more: --json lists all")
        return table

    def _time_table(self) -> Table:
        """The time split of the run, and its worker-hours."""
        table, split = _grid(), self.split
        if not split.wall_s:
            return table
        goodput = "" if split.goodput is None else f", goodput {split.goodput:.1%} with start-up"
        table.add_row("time", f"{duration(split.wall_s)}{goodput}")
        undriven = (
            f", {duration(split.undriven_s)} of it without a driver" if split.undriven_s else ""
        )
        for name, spent_s, note in (
            ("compute", split.compute_s, ""),
            ("redone", split.redone_s, ""),
            ("paused", split.paused_s, ""),
            ("waiting", split.waiting_s, undriven),
        ):
            table.add_row(name, f"{spent_s / split.wall_s:6.1%}  {duration(spent_s)}{note}")
        for name, hours in self._worker_hours_rows():
            table.add_row(name, hours)
        return table

    def _worker_hours_rows(self) -> Iterator[tuple[str, str]]:
        rows = self.worker_hours()
        costs = [row["cost"] for row in rows if row["cost"] is not None]
        total = f"{sum(row['hours'] for row in rows):.3g} worker-hours"
        total += f", cost {sum(costs):.2f}" if costs else ""
        total += " (places without a price excluded)" if 0 < len(costs) < len(rows) else ""
        yield "used", total
        for row in rows[:MAX_WORKERS_SHOWN]:
            cost = "" if row["cost"] is None else f", cost {row['cost']:.2f}"
            yield "", f"{shortened(row['place'], NODE_LENGTH)}: {row['hours']:.3g} h{cost}"


def _worker(
    history: History, worker: str, role: str, world_rank: int | None = None
) -> dict[str, Any]:
    place = history.membership.places.get(worker)
    return {
        "worker": worker,
        "role": role,
        "world_rank": world_rank,
        "node": place.node if place else None,
        "pid": place.pid if place else None,
        "since": place.since if place else None,
        "microbatches": history.dealt.by_worker.get(worker) if role == "member" else None,
        "compute_s": history.membership.compute_s.get(worker) if role == "member" else None,
        "peak_bytes": history.peak_bytes.get(worker),
    }


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    return table
