"""`elastic status`: how a run stands, from its storage alone; nobody is asked or disturbed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.live import Live

from actors.storage.lease import owner_of
from pipelines.observe.history.history import History
from pipelines.observe.history.history_file import FollowedHistory, load_history
from pipelines.observe.history.run_folder import RunFolder, find_run
from pipelines.observe.view.display import Display
from pipelines.observe.view.status_report import RunStatus
from pipelines.settings.errors import UserError

LOOK_EVERY_S = 1.0
JSON_EVERY_S = 10.0


class Looking:
    """Follows a run's files and says how it stands. Nothing is ever written."""

    def __init__(self, folder: RunFolder, prices: dict[str, float]) -> None:
        self.folder = folder
        self.history = History()
        self._prices = prices
        self._followed: FollowedHistory | None = None

    def look(self) -> RunStatus:
        """Raises `UserError` if the storage cannot be read."""
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
    """Show how the run stands, with `watch` until nobody drives it any more; the exit code.

    Raises `UserError` for a run that is not there.
    """
    looking = Looking(find_run(run_name, storage), parse_prices(prices))
    run_status = looking.look()
    if as_json:
        _print_json(run_status)
    elif not (watch and run_status.is_driven and console.is_terminal):
        _print_page(run_status, console)
    if not (watch and run_status.is_driven):
        return 0
    try:
        _watch(looking, as_json, console)
    except KeyboardInterrupt:
        return 130
    return 0


def parse_prices(prices: Iterable[str]) -> dict[str, float]:
    """Read `1.2` (of any worker's hour) and `g5.xlarge=1.2`. Raises `UserError`."""
    known: dict[str, float] = {}
    for text in prices:
        place, _, number = text.rpartition("=")
        try:
            known[place] = float(number)
        except ValueError:
            raise UserError(
                f"--price {text}: write what a worker costs an hour, e.g. 1.2, or for one type of "
                "node gpu=1.2"
            ) from None
    return known


def _watch(looking: Looking, as_json: bool, console: Console) -> None:
    """A page that is drawn anew, or objects one below the other, or the lines of a run's log."""
    if as_json:
        _repeat(looking, JSON_EVERY_S, _print_json)
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            _repeat(looking, LOOK_EVERY_S, lambda told: live.update(told.page(), refresh=True))
    else:
        with Display(console, looking.folder.name, time.time(), looking.history) as display:
            _repeat(looking, LOOK_EVERY_S, lambda told: display.update(told.now))
            console.print(display.summary(time.time()), highlight=False, soft_wrap=True)


def _repeat(looking: Looking, every_s: float, show: Callable[[RunStatus], object]) -> None:
    """Until nobody drives the run."""
    is_driven = True
    while is_driven:
        time.sleep(every_s)
        run_status = looking.look()
        is_driven = run_status.is_driven
        show(run_status)


def _print_page(run_status: RunStatus, console: Console) -> None:
    """Without the blanks with which tables fill their last column."""
    with console.capture() as page:
        console.print(run_status.page(), highlight=False)
    for line in page.get().splitlines():
        print(line.rstrip())


def _print_json(run_status: RunStatus) -> None:
    print(json.dumps(run_status.as_json(), allow_nan=False), flush=True)
