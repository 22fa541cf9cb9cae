"""Checks of a machine before its worker joins: compute, memory, device errors, links."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

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

WATCH_EVERY_S = 5.0


@dataclass
class MachineCheck:
    """The checks of one worker's machine. `host` is where its link server listens."""

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
        factor, device_id = self.options.slow_factor, identity_of(self.device)
        if self.options.check is not None:
            _run_check_of_user(self.options.check, self.device)
        lasting = self._errors.lasting() if self.options.device_errors else ""
        if reason := self.faults.device_error(step=0) or lasting:
            raise UnhealthyMachine(reason)
        if not factor:
            return MachineReport(device_id=device_id)
        check_memory(self.device)
        product_s = time_product(self.device)
        if reason := find_slow_links(here, peers, self.secret, factor, self.faults.link_factor):
            raise UnhealthyMachine(reason)
        port = LinkServer.open(self.host, self.network, self.secret)
        return MachineReport(product_s, processor_of(self.device), device_id, self.host, port)

    def watch(self, step: Callable[[], int], report: Callable[[str], None]) -> None:
        """From now on look for new errors of the device, and report the first one, once.

        `step` is the newest step of this worker, which injected faults need.
        """
        is_watched = self.options.device_errors and self.device.type == "cuda"
        if not (is_watched or self.faults.has_device_error):
            return

        def look() -> None:
            while not (error := self.faults.device_error(step()) or self._errors.new()):
                time.sleep(WATCH_EVERY_S)
            report(error)

        threading.Thread(target=look, name="device-errors", daemon=True).start()


def _run_check_of_user(name: str, device: torch.device) -> None:
    """Call the site's own check. Raises `UnhealthyMachine` for its reason and for its errors."""
    module, _, function = name.partition(":")
    try:
        reason = getattr(importlib.import_module(module), function)(device)
    except Exception as error:
        raise UnhealthyMachine(f"{name} raised {type(error).__name__}: {error}") from error
    if reason is not None:
        raise UnhealthyMachine(f"{name}: {reason}")
