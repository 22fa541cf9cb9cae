"""Notices of each cloud from a fake metadata server, of a pod from its file, and their watcher."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from metadata_server import Metadata, metadata_server

from actors.notices import NodeWatcher, Notice
from actors.notices.aws import Aws
from actors.notices.azure import EVENTS, NAME, Azure
from actors.notices.gcp import Gcp
from actors.notices.pod import Pod
from actors.notices.watcher import clouds_by_firmware

ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
MOMENT = 1505722920.0
"""2017-09-18, 08:22 UTC."""


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_aws_reports_a_spot_interruption() -> None:
    with metadata_server(Metadata(token="secret")) as aws:
        source = Aws(aws.address)
        assert source.poll() is None
        aws.answers[ACTION] = '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'
        aws.answers[REBALANCE] = '{"noticeTime": "2017-09-18T08:10:00Z"}'
        assert source.poll() == Notice("AWS spot interruption: terminate", MOMENT)


def test_aws_rebalance_recommendation_has_no_deadline() -> None:
    with metadata_server(Metadata(token="secret")) as aws:
        aws.answers[REBALANCE] = '{"noticeTime": "2017-09-18T08:10:00Z"}'
        assert Aws(aws.address).poll() == Notice("AWS rebalance recommendation")


def test_expired_token_of_aws_is_requested_again() -> None:
    with metadata_server(Metadata(token="first")) as aws:
        source = Aws(aws.address)
        source.poll()
        aws.token = "second"
        aws.answers[REBALANCE] = "{}"
        assert source.poll() == Notice("AWS rebalance recommendation")


def test_gcp_reports_a_preemption() -> None:
    answers, now = {PREEMPTED: "FALSE"}, [100.0]
    with metadata_server(Metadata(answers, required_headers={"Metadata-Flavor": "Google"})) as gcp:
        source = Gcp(gcp.address, lambda: now[0])
        assert source.poll() is None
        gcp.answers[PREEMPTED] = "TRUE"
        assert source.poll() == Notice("GCP preemption", 130.0)
        now[0] = 110.0
        assert source.poll() == Notice("GCP preemption", 130.0), "the deadline does not move"


def azure_event(kind: str, not_before: str, *machines: str) -> dict[str, object]:
    event_id = f"{kind} of {machines}"
    status = "Scheduled" if not_before else "Started"
    return {
        "EventId": event_id,
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": list(machines),
        "EventStatus": status,
        "NotBefore": not_before,
    }


def azure_events(*events: dict[str, object]) -> str:
    return json.dumps({"DocumentIncarnation": 1, "Events": events})


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_azure_reports_events_that_end_this_machine(kind: str) -> None:
    answers = {NAME: "trainer_3", EVENTS: azure_events()}
    with metadata_server(Metadata(answers, required_headers={"Metadata": "true"})) as azure:
        source = Azure(azure.address, lambda: 7.0)
        assert source.poll() is None
        azure.answers[EVENTS] = azure_events(
            azure_event(kind, "Mon, 18 Sep 2017 08:00:00 GMT", "trainer_4"),
            azure_event("Freeze", "Mon, 18 Sep 2017 08:00:00 GMT", "trainer_3"),
        )
        assert source.poll() is None, (
            "one event is for another machine, the other only freezes this one"
        )
        azure.answers[EVENTS] = azure_events(
            azure_event(kind, "Mon, 18 Sep 2017 08:22:00 GMT", "trainer_2", "trainer_3")
        )
        assert source.poll() == Notice(f"Azure {kind}", MOMENT)
        azure.answers[EVENTS] = azure_events(azure_event(kind, "", "trainer_3"))
        assert source.poll() == Notice(f"Azure {kind}", 7.0), "the event has started"


def test_pod_is_notified_by_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ends-at"
    now = [MOMENT - 30.0]
    source = Pod(file, lambda: now[0])
    assert source.poll() is None
    file.write_text("")  # the hook has created the file but not yet written it
    assert source.poll() is None
    file.write_text("1505722920\n")
    assert source.poll() == Notice("the pod is terminated", MOMENT)
    now[0] = MOMENT + 90.0
    assert source.poll() is None, "an old file that was not removed is ignored"


def test_metadata_requests_bypass_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with metadata_server(Metadata({PREEMPTED: "FALSE"})) as gcp:
        assert Gcp(gcp.address).poll() is None


@pytest.mark.parametrize("cloud", [Aws, Gcp, Azure])
def test_answers_that_do_not_fit_the_cloud_are_errors(
    cloud: Callable[[str], Aws | Gcp | Azure],
) -> None:
    """One server knows no path; another answers every path with HTML."""
    with metadata_server(Metadata()) as empty, pytest.raises((OSError, ValueError)):
        cloud(empty.address).poll()
    page = dict.fromkeys((ACTION, REBALANCE, PREEMPTED, NAME, EVENTS), "<html>")
    with metadata_server(Metadata(page, token="any")) as page, pytest.raises((OSError, ValueError)):
        cloud(page.address).poll()


def test_watcher_soon_stops_querying_sources_that_never_answer(tmp_path: Path) -> None:
    """One port has no listener; another one accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as mute, metadata_server(Metadata()) as empty:
        silent = f"http://127.0.0.1:{mute.getsockname()[1]}"
        guesses = [Aws("http://127.0.0.1:1"), Gcp(silent), Azure(empty.address)]
        started = time.monotonic()
        watcher = NodeWatcher([Pod(tmp_path / "none", lambda: 0.0)], guesses, every_s=0.01)
        assert time.monotonic() - started < 0.5, "the start does not wait for the sources"
        wait_until(lambda: watcher.num_queried == 1)
        num_requests = len(empty.requested_paths)
        (tmp_path / "none").write_text("5")
        wait_until(lambda: watcher.notice)
        assert len(empty.requested_paths) == num_requests
        assert watcher.notice == Notice("the pod is terminated", 5.0)
        watcher.close()


def test_watcher_queries_a_source_that_answered_once_for_ever() -> None:
    with metadata_server(Metadata({PREEMPTED: "FALSE"})) as gcp:
        watcher = NodeWatcher([], [Gcp(gcp.address, lambda: 0.0)], every_s=0.01)
        wait_until(lambda: len(gcp.requested_paths) > 3)
        del gcp.answers[PREEMPTED]
        num_requests = len(gcp.requested_paths)
        wait_until(lambda: len(gcp.requested_paths) > num_requests + 9)
        gcp.answers[PREEMPTED] = "TRUE"
        wait_until(lambda: watcher.notice)
        assert watcher.notice == Notice("GCP preemption", 30.0)
        watcher.close()


def test_notice_with_the_nearest_deadline_counts(tmp_path: Path) -> None:
    (tmp_path / "ends-at").write_text("5")
    with metadata_server(Metadata({REBALANCE: "{}"}, token="secret")) as aws:
        sources = [Aws(aws.address), Pod(tmp_path / "ends-at", lambda: 0.0)]
        watcher = NodeWatcher(sources, every_s=0.01)
        wait_until(lambda: watcher.notice)
        assert watcher.notice == Notice("the pod is terminated", 5.0)
        watcher.close()


@pytest.mark.parametrize(
    ("fields", "clouds"),
    [
        ({"sys_vendor": "Amazon EC2", "bios_version": "1.0"}, [Aws]),
        ({"sys_vendor": "Xen", "bios_version": "4.2.amazon"}, [Aws]),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, [Gcp]),
        (
            {
                "sys_vendor": "Microsoft Corporation",
                "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77",
            },
            [Azure],
        ),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}, []),
        ({"sys_vendor": "Dell Inc."}, []),
    ],
)
def test_cloud_is_recognized_by_the_firmware(
    tmp_path: Path, fields: dict[str, str], clouds: list[type]
) -> None:
    for name, value in fields.items():
        (tmp_path / name).write_text(f"{value}\n")
    assert [type(source) for source in clouds_by_firmware(tmp_path) or []] == clouds


def test_missing_firmware_files_leave_the_cloud_unknown(tmp_path: Path) -> None:
    assert clouds_by_firmware(tmp_path) is None
