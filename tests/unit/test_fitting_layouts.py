"""After an out-of-memory error the advice names a layout that fits, by the formula of ZeRO."""

from __future__ import annotations

import pytest
import torch

from actors.worker.error_kinds import kind_of, wanted_of
from elastic.geometry.layout import Layout
from elastic.geometry.training_job import Job
from elastic.planner.fitting_layouts import Shortage, advice, fitting_layout
from elastic.planner.models.memory_model import worker_bytes

JOB = Job(num_microbatches=16, state_bytes=1200, param_bytes=400, margin=1.0)
"""400 bytes of parameters, as many of gradients, 800 of moments."""


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("dp=4", 1600),
        ("fsdp=4", 400),
        ("fsdp=4,zero=2", 400 + 1200 / 4),
        ("fsdp=4,zero=1", 800 + 800 / 4),
        ("fsdp=4,zero=0", 1600),
        ("pp=2,tp=4,fsdp=2", 150),
        ("cp=4", 1600),
    ],
)
def test_worker_bytes_follow_the_layout_and_the_zero_stage(layout: str, expected: float) -> None:
    assert worker_bytes(JOB, Layout.parse(layout)) == expected


@pytest.mark.parametrize(
    ("layout", "requested_bytes", "expected"),
    [
        ("dp=1", 800, "fsdp=2"),
        ("dp=1", 801, "fsdp=3"),
        ("dp=4", 1500, "fsdp=16"),
        ("dp=1", 1501, None),
        ("fsdp=2,zero=1", 1, "fsdp=2,zero=2"),
        ("dp=2,fsdp=2,zero=1", 200, "dp=2,fsdp=2,zero=2"),
        ("fsdp=2,zero=1", 401, "fsdp=3"),
        ("tp=2", 400, "fsdp=2,tp=2"),
    ],
)
def test_fitting_layout_has_fewest_shards_then_lowest_zero_stage(
    layout: str, requested_bytes: int, expected: str | None
) -> None:
    fitting = fitting_layout(Layout.parse(layout), JOB, Shortage(2000, requested_bytes))
    assert (fitting and str(fitting)) == expected


def test_shortage_without_a_request_counts_as_a_tenth() -> None:
    layout = Layout.parse("dp=1")
    assert str(fitting_layout(layout, JOB, Shortage(8000))) == "fsdp=2"
    assert fitting_layout(layout, JOB, Shortage(16000)) is None


def test_advice_is_one_line_with_the_bytes() -> None:
    job = Job(num_microbatches=16, state_bytes=1_200_000_000, param_bytes=400_000_000)
    text = advice(Layout(), job, Shortage(3_000_000_000, 500_000_000))
    assert text == (
        "it held 3,000.0 MB and requested 500.0 MB more; by the memory model fsdp=2 on 2 workers "
        "would fit: 800.0 MB less on each"
    )
    hopeless = advice(Layout(), job, Shortage(3_000_000_000, 5_000_000_000))
    assert "lower microbatch" in hopeless and "1,600.0 MB" in hopeless


@pytest.mark.parametrize(
    ("error", "requested_bytes"),
    [
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
                "allocate memory: you tried to allocate 21474836480 bytes. Error code 12"
            ),
            20 << 30,
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"),
            5 << 29,
        ),
        (MemoryError("Unable to allocate 512. KiB for an array with shape (1,)"), 512 << 10),
        (MemoryError(), 0),
    ],
)
def test_requested_bytes_are_parsed_from_allocator_messages(
    error: Exception, requested_bytes: int
) -> None:
    assert kind_of(error) == "memory"
    assert wanted_of(error) == requested_bytes


def test_failed_allocation_of_the_installed_torch_is_parsed() -> None:
    """The request is larger than any address space."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 46)
    assert kind_of(raised.value) == "memory"
    assert wanted_of(raised.value) == 1 << 48
