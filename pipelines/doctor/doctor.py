"""All checks, one after the other, and the table of what they have found."""

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
from pipelines.observe.history.formatting import counted
from pipelines.observe.history.run_folder import RunFolder
from pipelines.settings import TrainSettings
from pipelines.settings.errors import UserError
from pipelines.settings.overrides import override

STYLES: dict[CheckVerdict, str] = {"ok": "green", "warning": "yellow", "failed": "red"}
NOWHERE = "127.0.0.1"


@dataclass(frozen=True)
class DoctorRequest:
    """The command line of `elastic doctor`, as typed; each option is that of `train`."""

    storage: str = "runs"
    tracking_uri: str | None = None
    data: str | None = None
    interface: str | None = None
    ports: str | None = None


def doctor(request: DoctorRequest, console: Console) -> int:
    """Print what was found; return 1 if anything has failed. Raises `UserError`."""
    return _report(list(findings(request)), console)


def check_run(run_name: str, storage: str, repair: bool, console: Console) -> int:
    """Check the files of a run, and with `repair` set damaged ones aside; the exit code as of
    `doctor`. Raises `UserError`, also if somebody drives the run that is to be repaired."""
    folder = RunFolder.of(storage, run_name)
    try:
        found = list(repair_run(folder) if repair else check_files(folder))
    except OSError as error:
        raise UserError(f"{folder.url}: {error}") from None
    return _report(found, console)


def _report(found: list[Finding], console: Console) -> int:
    """Print the table; return 1 if anything has failed."""
    console.print(_table(found))
    num = {verdict: sum(f.verdict == verdict for f in found) for verdict in STYLES}
    console.print(
        f"{counted(len(found), 'check')}: {num['failed']} failed, "
        f"{counted(num['warning'], 'warning')}",
        highlight=False,
    )
    return 1 if num["failed"] else 0


def findings(request: DoctorRequest) -> Iterator[Finding]:
    """What there is to tell, in the order in which a run would need it. Raises `UserError`."""
    changes = [f"network.interface={request.interface}"] if request.interface else []
    changes += [f"network.ports={request.ports}"] if request.ports else []
    told = override(TrainSettings(), changes).network
    network = Network(told.interface, told.port_range)
    address = os.environ.get("RAY_ADDRESS")
    checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("versions", software.versions),
        ("GPUs", software.gpus),
        ("limits", machine.limits),
        ("network", partial(machine.network, network, _host_of(address))),
        ("storage", partial(places.storage, request.storage)),
        ("tracking", partial(places.tracking, request.tracking_uri, request.storage)),
        ("Ray cluster", partial(cluster, address, NAMESPACE)),
    ]
    if request.data is not None:
        checks.append(("data", lambda: [places.data(request.data or "", request.storage)]))
    for what, check in checks:
        yield from _kept(what, check)


def _kept(what: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """A check that breaks is a finding as well: the others are made all the same."""
    try:
        yield from check()
    except UserError as error:
        yield Finding(what, str(error), "failed")
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        value = f"this check broke: {type(error).__name__}: {lines[0]}"
        yield Finding(what, value, "failed", "if nothing here explains it, it is a bug: tell of it")


def _host_of(address: str | None) -> str:
    """The host in `RAY_ADDRESS`: towards it the traffic of a run goes."""
    place = (address or "").rpartition("://")[2].partition("/")[0]
    host = place.rpartition(":")[0] or place
    return host.strip("[]") if host not in ("", "auto", "local") else NOWHERE


def _table(found: Iterable[Finding]) -> Table:
    table = Table()
    for name in ("what", "found", "", "how to mend it"):
        table.add_column(name, overflow="fold")
    for one in found:
        verdict = Text(one.verdict, style=STYLES[one.verdict])
        table.add_row(one.what, Text(one.value), verdict, Text(one.mend))
    return table
