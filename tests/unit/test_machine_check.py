"""The checks that a worker runs on its machine before it joins."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from actors.health import device_speed, links
from actors.health.checks import MachineCheck, within
from actors.health.device_errors import DeviceErrors
from actors.health.health_options import HealthOptions
from actors.health.link_server import NUM_LEFT_PORTS, LinkServer, measure_link
from actors.health.links import find_slow_links
from actors.runtime.fault_spec import Fault
from actors.runtime.faults import FaultInjector
from actors.runtime.network import ANYWHERE, Network
from actors.storage.errors import UnhealthyMachine
from elastic.geometry.machine_report import MachineReport, Peer
from elastic.geometry.topology import Place

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
HOST = "127.0.0.1"
SECRET = b"secret of this test"
HERE = Place("here", "rack")


def check(options: HealthOptions, *faults: Fault, peers: Sequence[Peer] = ()) -> MachineReport:
    injector = FaultInjector("w1", faults)
    return MachineCheck(options, CPU, injector, HOST, ANYWHERE, SECRET).run(HERE, peers)


def make_peers(*places: Place) -> list[Peer]:
    return [Peer(*place, HOST, LinkServer.open(HOST, ANYWHERE, SECRET)) for place in places]


def test_healthy_machine_reports_its_speed_and_a_link_server() -> None:
    report = check(HealthOptions(slow_factor=4.0))
    assert 1e-4 < report.product_s < 1.0
    assert report.processor and not report.device_id
    assert measure_link((report.host, report.port), SECRET) > 1e6


def test_link_server_serves_no_stranger() -> None:
    port = LinkServer.open(HOST, ANYWHERE, SECRET)
    assert measure_link((HOST, port), b"another secret") == 0.0


def test_worker_without_a_free_port_has_no_link_server() -> None:
    taken = LinkServer.open(HOST, ANYWHERE, SECRET)
    only_that = Network(ports=(taken - NUM_LEFT_PORTS, taken))
    assert LinkServer.open(HOST, only_that, SECRET) == 0
    assert LinkServer.open(HOST, Network(ports=(1024, 1024 + NUM_LEFT_PORTS - 1)), SECRET) == 0


def test_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.mm

    def flip(one: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> None:
        multiply(one, other, out=out)
        out[7, 9] *= -1

    monkeypatch.setattr(device_speed.torch, "mm", flip)
    with pytest.raises(UnhealthyMachine, match="1 of 147456 entries of a matrix product"):
        device_speed.time_product(CPU)


def test_lost_byte_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = torch.Tensor.fill_

    def lose(memory: torch.Tensor, value: int) -> torch.Tensor:
        fill(memory, value)
        memory[5] ^= 4
        return memory

    monkeypatch.setattr(torch.Tensor, "fill_", lose)
    with pytest.raises(UnhealthyMachine, match="1 of 16777216 bytes of memory"):
        device_speed.check_memory(CPU)


def test_check_of_the_site_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    site: Any = SimpleNamespace(
        good=lambda device: None,
        bad=lambda device: f"the fan of {device} is loud",
        broken=lambda device: 1 // 0,
        mistaken=lambda device: True,
    )
    monkeypatch.setitem(sys.modules, "site_of_test", site)
    assert check(HealthOptions("site_of_test:good")).product_s > 0
    with pytest.raises(UnhealthyMachine, match=r"returned True instead of None or a reason"):
        check(HealthOptions("site_of_test:mistaken"))
    with pytest.raises(UnhealthyMachine, match=r"site_of_test:bad: the fan of cpu is loud"):
        check(HealthOptions("site_of_test:bad"))
    with pytest.raises(UnhealthyMachine, match=r"site_of_test:broken: a check raised ZeroDiv"):
        check(HealthOptions("site_of_test:broken"))
    with pytest.raises(UnhealthyMachine, match="no_such_module_here"):
        check(HealthOptions("no_such_module_here:check"))


def test_injected_device_error_refuses_the_worker_only_before_it_joins() -> None:
    with pytest.raises(UnhealthyMachine, match="uncorrectable ECC error"):
        check(HealthOptions(), Fault("ecc", "w1", 0))
    assert check(HealthOptions(), Fault("ecc", "w1", 5)).product_s > 0
    injector = FaultInjector("w1", (Fault("ecc", "w1", 5),))
    assert [bool(injector.device_error(step)) for step in (0, 4, 5, 6)] == [0, 0, 1, 0]


def test_equally_fast_links_are_accepted() -> None:
    peers = make_peers(Place("a", "rack"), Place("b", "rack"), Place("c", ""))
    assert find_slow_links(HERE, peers, SECRET, slow_factor=4.0) == ""


@pytest.mark.parametrize("rack", ["rack", ""])
def test_slow_links_are_refused(rack: str) -> None:
    peers = make_peers(Place("a", rack), Place("b", rack))
    reason = find_slow_links(Place("here", rack), peers, SECRET, 4.0, slowed_by=150.0)
    assert reason.startswith("its links to a, b reach ") and "MB/s" in reason


def test_links_without_equally_near_ones_between_members_are_not_judged() -> None:
    other_rack = make_peers(Place("a", "other"), Place("b", "other"))
    assert find_slow_links(HERE, other_rack, SECRET, 4.0, slowed_by=150.0) == ""
    one_peer = make_peers(Place("a", "rack"))
    assert find_slow_links(HERE, one_peer, SECRET, 4.0, slowed_by=150.0) == ""
    same_node = make_peers(Place("here", "rack"), Place("here", "rack"))
    assert find_slow_links(HERE, same_node, SECRET, 4.0, slowed_by=150.0) == ""


def test_dead_members_are_no_reason_to_refuse_a_worker() -> None:
    alive = make_peers(Place("a", "rack"), Place("b", "rack"))
    dead = Peer("c", "rack", HOST, 9)
    assert find_slow_links(HERE, [dead, *alive], SECRET, 4.0) == ""
    assert find_slow_links(HERE, [dead, Peer("d", "rack", HOST, 9)], SECRET, 4.0) == ""


def test_machine_that_reaches_no_member_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = make_peers(Place("a", "rack"), Place("b", "rack"))
    monkeypatch.setattr(links, "measure_link", lambda *arguments: 0.0)
    assert "reach 0 MB/s" in find_slow_links(HERE, peers, SECRET, 4.0)


class Nvml:
    """NVML of one GPU, with the real library's names and errors; `None` is not supported."""

    def __init__(self) -> None:
        self.ecc: int | None = 0
        self.rows: tuple[int, int, int, int] | None = (0, 0, 0, 0)
        self.reasons: int | None = 0
        self.xids: list[int] = []
        self.is_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        """As if there were a driver."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-0123"
        return "handle"

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: str) -> None:
        assert (handle, kinds, events) == ("handle", pynvml.nvmlEventTypeXidCriticalError, "events")

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> SimpleNamespace:
        if not self.xids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(eventData=self.xids.pop(0))

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, since: int) -> int:
        assert (kind, since) == (1, 0), "uncorrectable, since the last reset"
        return self._supported(self.ecc)

    def nvmlDeviceGetRemappedRows(self, handle: str) -> tuple[int, int, int, int]:
        return self._supported(self.rows)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self._supported(self.reasons)

    def _supported(self, value: Any) -> Any:
        if self.is_lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if value is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    properties = SimpleNamespace(uuid="0123")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return Nvml()


def open_errors(nvml: Nvml) -> DeviceErrors:
    return DeviceErrors(torch.device("cuda", 0), nvml)


def test_gpu_without_errors_is_accepted(nvml: Nvml) -> None:
    errors = open_errors(nvml)
    assert errors.lasting() == "" and [errors.new() for _ in range(5)] == [""] * 5


def test_gpu_without_counters_is_accepted(nvml: Nvml) -> None:
    nvml.ecc = nvml.rows = nvml.reasons = None
    errors = open_errors(nvml)
    assert errors.lasting() == "" and errors.new() == ""


def test_cpu_has_no_device_errors() -> None:
    errors = DeviceErrors(CPU)
    assert errors.lasting() == "" and errors.new() == ""


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"ecc": 3}, "3 uncorrectable ECC errors since the GPU's last reset"),
        ({"rows": (1, 1, 1, 0)}, "has to be reset"),
        ({"rows": (1, 1, 1, 1)}, "has to be replaced"),
        ({"reasons": 0x40 | 0x8}, "too hot"),
        ({"reasons": 0x80 | 0x8}, "power supply"),
    ],
)
def test_lasting_errors_refuse_a_gpu(nvml: Nvml, state: dict[str, Any], reason: str) -> None:
    vars(nvml).update(state)
    assert reason in open_errors(nvml).lasting()


def test_usual_clock_limits_are_no_errors(nvml: Nvml) -> None:
    nvml.reasons = 0x1 | 0x2 | 0x4 | 0x20  # idle, clock setting, power cap, software thermal limit
    assert open_errors(nvml).lasting() == ""


def test_new_errors_are_reported_once(nvml: Nvml) -> None:
    nvml.ecc = 2
    errors = open_errors(nvml)
    assert errors.new() == ""
    nvml.ecc = 5
    assert errors.new() == "3 new uncorrectable ECC errors"
    assert errors.new() == ""


def test_xids_of_the_program_are_ignored(nvml: Nvml) -> None:
    errors = open_errors(nvml)
    nvml.xids = [13, 31, 79, 43]
    assert errors.new() == "Xid 79: the GPU has fallen off the bus"
    assert errors.new() == ""


def test_lost_gpu_is_reported(nvml: Nvml) -> None:
    errors = open_errors(nvml)
    nvml.is_lost = True
    assert errors.new() == "the GPU is lost"


def test_short_slowdown_refuses_no_gpu(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([0x40, 0x40, 0x0])
    monkeypatch.setattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda _: next(readings))
    assert open_errors(nvml).lasting() == ""
    assert next(readings, None) is None, "it was read until it was over"


def test_slowdown_while_training_is_left_to_the_detection_of_stragglers(nvml: Nvml) -> None:
    errors = open_errors(nvml)
    nvml.reasons = 0x80
    assert [errors.new() for _ in range(10)] == [""] * 10


def test_check_that_blocks_is_a_failed_one() -> None:
    with pytest.raises(UnhealthyMachine, match=r"the device: a check did not end within 0\.1 s"):
        within(0.1, "the device", lambda: time.sleep(5.0))
    with pytest.raises(UnhealthyMachine, match="the device: a check raised RuntimeError: CUDA"):
        within(5.0, "the device", fail)


def fail() -> None:
    raise RuntimeError("CUDA error: unspecified launch failure")
