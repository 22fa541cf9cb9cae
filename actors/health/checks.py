"""Checks of a machine before its worker joins: compute, memory, device errors, links."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from actors.distributed.device_check import TimeLimitExceeded, run_within
from actors.health.device_errors import DeviceErrors
from actors.health.device_speed import check_memory, identity_of, processor_of, time_product
from actors.health.health_options import HealthOptions
from actors.health.link_server import LinkServer
from actors.health.links import find_slow_links
from actors.runtime.faults import FaultInjector
from actors.runtime.network import Network
from actors.storage.errors import UnhealthyMachine
from elastic.geometry.machine_report import MachineReport, Peer
from elastic.geometry.topology import Place

T = TypeVar("T")

LOOK_EVERY_S, REPORT_EVERY_S = 5.0, 600.0
"""A worker that the run needs stays in spite of its device's errors; they are reported again."""
CHECK_LIMIT_S, LIMIT_OF_USERS_S = 60.0, 600.0


@dataclass
class MachineCheck:
    """The checks of one worker's machine. `host` is where its link server listens; empty if this
    process shall have none."""

    options: HealthOptions
    device: torch.device
    faults: FaultInjector
    host: str
    network: Network
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        self._errors = DeviceErrors(self.device)

    def run(self, here: Place, peers: Sequence[Peer]) -> MachineReport:
        """Check everything that this worker can check alone or with its peers.

        Returns what the controller compares with other workers. Raises `UnhealthyMachine`.
        """
        name, factor = self.options.check, self.options.slow_factor
        if name is not None:
            within(LIMIT_OF_USERS_S, name, lambda: _run_check_of_user(name, self.device))
        lasting = self._errors.lasting() if self.options.device_errors else ""
        if reason := self.faults.device_error(step=0) or lasting:
            raise UnhealthyMachine(reason)
        product_s = within(CHECK_LIMIT_S, "the device", self._check_device)
        slowed_by = self.faults.link_factor
        if factor and (slow := find_slow_links(here, peers, self.secret, factor, slowed_by)):
            raise UnhealthyMachine(f"{slow} (health.slow_factor={factor:g})")
        is_probed = bool(self.host and factor)
        port = LinkServer.open(self.host, self.network, self.secret) if is_probed else 0
        processor, device_id = processor_of(self.device), identity_of(self.device)
        return MachineReport(product_s, processor, device_id, self.host, port)

    def watch(self, step: Callable[[], int], report: Callable[[str], None]) -> None:
        """From now on look for new errors of the device, on a thread of its own.

        `step` is the newest step of this worker, which injected faults need.
        """
        is_watched = self.options.device_errors and self.device.type == "cuda"
        if not (is_watched or self.faults.has_device_error):
            return

        def look() -> None:
            while not (error := self.faults.device_error(step()) or self._errors.new()):
                time.sleep(LOOK_EVERY_S)
            while True:
                report(error)
                time.sleep(REPORT_EVERY_S)

        threading.Thread(target=look, name="device-errors", daemon=True).start()

    def _check_device(self) -> float:
        check_memory(self.device)
        return time_product(self.device)


def within(limit_s: float, what: str, check: Callable[[], T]) -> T:
    """The result of a check that may block, on a thread of its own. Raises `UnhealthyMachine` if
    the check raises, or takes longer."""
    try:
        return run_within(limit_s, check)
    except UnhealthyMachine:
        raise
    except TimeLimitExceeded:
        text = f"{what}: a check did not end within {limit_s:g} s"
        raise UnhealthyMachine(text) from None
    except BaseException as error:
        text = f"{what}: a check raised {type(error).__name__}: {error}"
        raise UnhealthyMachine(text) from error


def _run_check_of_user(name: str, device: torch.device) -> None:
    """Call the site's own check. Raises `UnhealthyMachine` with its reason, and what it raises."""
    module, _, function = name.partition(":")
    reason = getattr(importlib.import_module(module), function)(device)
    if reason is not None and not (isinstance(reason, str) and reason):
        raise UnhealthyMachine(f"{name} returned {reason!r} instead of None or a reason")
    if reason is not None:
        raise UnhealthyMachine(f"{name}: {reason}")
