"""The sequence of all checks and the table of their findings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.table import Table
from rich.text import Text

from actors.ray_backend.actor_names import NAMESPACE
from actors.runtime.network import Network
from pipelines.doctor import machine, places, software
from pipelines.doctor.cluster import cluster
from pipelines.doctor.finding import CheckVerdict, Finding
from pipelines.doctor.run_files import check_files, repair_run
from pipelines.errors import UserError
from pipelines.observe.history.formatting import counted
from pipelines.observe.history.run_folder import RunFolder
from pipelines.settings import TrainSettings
from pipelines.settings.overrides import override

STYLES: dict[CheckVerdict, str] = {"ok": "green", "warning": "yellow", "failed": "red"}
NOWHERE = "127.0.0.1"


@dataclass(frozen=True)
class DoctorRequest:
    """The command line of `elastic doctor`, as typed; the options are those of `train`."""

    storage: str = "runs"
    tracking_uri: str | None = None
    data: str | None = None
    interface: str | None = None
    ports: str | None = None


def doctor(request: DoctorRequest, console: Console) -> int:
    """Check the environment and print the findings; return 1 if any check failed.

    Raises `UserError`.
    """
    return _report(list(findings(request)), console)


def check_run(run_name: str, storage: str, repair: bool, console: Console) -> int:
    """Check the files of a run, with `repair` set damaged ones aside; return 1 if any check failed.

    Raises `UserError`, also for a repair of a run that has a driver.
    """
    folder = RunFolder.of(storage, run_name)
    try:
        results = list(repair_run(folder) if repair else check_files(folder))
    except OSError as error:
        raise UserError(f"{folder.url}: {error}") from None
    return _report(results, console)


def _report(results: list[Finding], console: Console) -> int:
    """Print the table; return 1 if any check failed."""
    console.print(_table(results))
    num = {verdict: sum(f.verdict == verdict for f in results) for verdict in STYLES}
    console.print(
        f"{counted(len(results), 'check')}: {num['failed']} failed, "
        f"{counted(num['warning'], 'warning')}",
        highlight=False,
    )
    return 1 if num["failed"] else 0


def findings(request: DoctorRequest) -> Iterator[Finding]:
    """The findings of all checks, in the order in which a run needs them. Raises `UserError`."""
    changes = [f"network.interface={request.interface}"] if request.interface else []
    changes += [f"network.ports={request.ports}"] if request.ports else []
    settings = override(TrainSettings(), changes).network
    network = Network(settings.interface, settings.port_range)
    address = os.environ.get("RAY_ADDRESS")
    checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("versions", software.versions),
        ("GPUs", software.gpus),
        ("health", machine.devices),
        ("limits", machine.limits),
        ("network", partial(machine.network, network, _host_of(address))),
        ("storage", partial(places.storage, request.storage)),
        ("tracking", partial(places.tracking, request.tracking_uri, request.storage)),
        ("Ray cluster", partial(cluster, address, NAMESPACE)),
    ]
    if request.data is not None:
        checks.append(("data", lambda: [places.data(request.data or "", request.storage)]))
    for name, check in checks:
        yield from _run_check(name, check)


def _run_check(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of a check. A check that raises is a finding too, and the others still run."""
    try:
        yield from check()
    except UserError as error:
        yield Finding(name, str(error), "failed")
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        value = f"this check crashed: {type(error).__name__}: {lines[0]}"
        yield Finding(name, value, "failed", "if no other finding explains it, report a bug")


def _host_of(address: str | None) -> str:
    """The host in `RAY_ADDRESS`, to which the traffic of a run goes."""
    place = (address or "").rpartition("://")[2].partition("/")[0]
    host = place.rpartition(":")[0] or place
    return host.strip("[]") if host not in ("", "auto", "local") else NOWHERE


def _table(results: Iterable[Finding]) -> Table:
    table = Table()
    for name in ("check", "result", "status", "fix"):
        table.add_column(name, overflow="fold")
    for finding in results:
        verdict = Text(finding.verdict, style=STYLES[finding.verdict])
        table.add_row(finding.check, Text(finding.value), verdict, Text(finding.fix))
    return table
