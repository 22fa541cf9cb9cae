"""`elastic status`: the status of a run, read from its storage without contacting the run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.live import Live

from actors.storage.lease import owner_of
from pipelines.errors import UserError
from pipelines.observe.history.history import History
from pipelines.observe.history.history_file import FollowedHistory, load_history
from pipelines.observe.history.run_folder import RunFolder, find_run
from pipelines.observe.view.display import Display
from pipelines.observe.view.status_report import RunStatus

LOOK_EVERY_S = 1.0
JSON_EVERY_S = 10.0


class StatusReader:
    """Follows a run's files and reports its status; writes nothing."""

    def __init__(self, folder: RunFolder, prices: dict[str, float]) -> None:
        self.folder = folder
        self.history = History()
        self._prices = prices
        self._followed: FollowedHistory | None = None

    def read(self) -> RunStatus:
        """The status now. Raises `UserError` if the storage cannot be read."""
        try:
            owner = owner_of(self.folder.files)
            if self._followed is None:
                self._followed = load_history(self.folder, needs_all_metrics=False)
                self.history = self._followed.history
            self._followed.follow()
        except OSError as error:
            raise UserError(f"{self.folder.url}: cannot be read ({error})") from None
        now, folder = time.time(), self.folder
        return RunStatus(folder.name, folder.url, now, self.history, owner, self._prices)


def status(
    run_name: str, storage: str, prices: Iterable[str], watch: bool, as_json: bool, console: Console
) -> int:
    """Show the status of a run, with `watch` until its driver ends; return the exit code.

    Raises `UserError` if there is no such run.
    """
    reader = StatusReader(find_run(run_name, storage), parse_prices(prices))
    run_status = reader.read()
    if as_json:
        _print_json(run_status)
    elif not (watch and run_status.is_driven and console.is_terminal):
        _print_page(run_status, console)
    if not (watch and run_status.is_driven):
        return 0
    try:
        _watch(reader, as_json, console)
    except KeyboardInterrupt:
        return 130
    return 0


def parse_prices(prices: Iterable[str]) -> dict[str, float]:
    """Read `1.2` (per hour of any worker) and `g5.xlarge=1.2`. Raises `UserError`."""
    prices_by_place: dict[str, float] = {}
    for text in prices:
        place, _, number = text.rpartition("=")
        try:
            prices_by_place[place] = float(number)
        except ValueError:
            raise UserError(
                f"--price {text}: give the price of a worker-hour, e.g. 1.2, or that of a node "
                "type, e.g. gpu=1.2"
            ) from None
    return prices_by_place


def _watch(reader: StatusReader, as_json: bool, console: Console) -> None:
    """Redraw a page, or print JSON objects, or, outside a terminal, the log lines of the run."""
    if as_json:
        _repeat(reader, JSON_EVERY_S, _print_json)
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            _repeat(
                reader,
                LOOK_EVERY_S,
                lambda run_status: live.update(run_status.page(), refresh=True),
            )
    else:
        with Display(console, reader.folder.name, time.time(), reader.history) as display:
            _repeat(reader, LOOK_EVERY_S, lambda run_status: display.update(run_status.now))
            console.print(display.summary(time.time()), highlight=False, soft_wrap=True)


def _repeat(reader: StatusReader, every_s: float, show: Callable[[RunStatus], object]) -> None:
    """Show the status at intervals until the run's driver ends."""
    is_driven = True
    while is_driven:
        time.sleep(every_s)
        run_status = reader.read()
        is_driven = run_status.is_driven
        show(run_status)


def _print_page(run_status: RunStatus, console: Console) -> None:
    """Print the page without the trailing blanks of its tables."""
    with console.capture() as page:
        console.print(run_status.page(), highlight=False)
    for line in page.get().splitlines():
        print(line.rstrip())


def _print_json(run_status: RunStatus) -> None:
    print(json.dumps(run_status.as_json(), allow_nan=False), flush=True)
