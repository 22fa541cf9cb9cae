"""Reader processes: what they read, in which order, and what happens when one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from datasets_to_read import BAD_SAMPLE, Bad, Numbers, Pids, keep
from torch.utils.data import default_collate

from pipelines.errors import UserError
from pipelines.reading.pass_reader import PassReader, Request
from pipelines.reading.readers import Readers
from pipelines.settings import ReadingSettings

pytestmark = pytest.mark.slow


def never() -> None:
    """The `interrupt` that never raises."""


def raise_if_waiting() -> None:
    raise AssertionError("the batch is not there yet")


def make_plan(num_passes: int, first: int = 0) -> list[Request]:
    """Passes of two microbatches of two samples each."""
    return [
        ((2 * n + 1, (4 * n % 100, 4 * n % 100 + 1)), (2 * n + 2, (4 * n % 100 + 2, 99)))
        for n in range(first, first + num_passes)
    ]


def single(*samples: int) -> list[Request]:
    return [((sample, (sample,)),) for sample in samples]


@contextmanager
def reading(
    dataset: Callable[[], Any],
    collate: Callable[[list[Any]], Any] = default_collate,
    begin_process: Callable[[int], None] | None = None,
    **settings: Any,
) -> Iterator[Readers]:
    reader = PassReader(dataset, collate, begin_process)
    readers = Readers(reader, ReadingSettings(**{"num_readers": 2, **settings}))
    try:
        yield readers
    finally:
        pids = [reader.pid for reader in readers._readers if reader.pid is not None]
        processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        readers.close()
        wait_for_end(processes)


def test_batches_equal_those_of_the_training_thread() -> None:
    plan, own = make_plan(30), PassReader(Numbers, default_collate)
    with reading(Numbers) as readers:
        readers.follow(plan)
        for request in plan:
            batch, expected = readers.take(request, never), own.read(request)
            assert torch.equal(batch["drawn"], expected["drawn"]), "the seeds are the microbatches'"
            assert torch.equal(batch["index"], expected["index"])
            assert torch.equal(batch["array"], expected["array"])
            assert batch["row"].name == expected["row"].name
            assert torch.equal(batch["row"].image, expected["row"].image)
            assert batch["nothing"].shape == expected["nothing"].shape


def test_batches_of_arrays_and_of_any_objects_arrive() -> None:
    with reading(Numbers, keep) as readers:
        items = readers.take(make_plan(1)[0], never)
    assert [int(item["index"]) for item in items] == [0, 1, 2, 99]
    assert items[2]["array"].tolist() == [2, 2, 2] and items[2]["array"].flags.writeable
    assert items[3]["row"].name == "sample 99"


def test_readers_work_ahead_in_parallel_and_know_their_number() -> None:
    plan = make_plan(12)
    with reading(Pids, keep) as readers:
        readers.follow(plan)
        batches = [readers.take(request, never) for request in plan]
        pids = {pid for batch in batches for pid, _ in batch}
        assert {number for batch in batches for _, number in batch} == {0, 1}
        assert len(pids) == 2 and os.getpid() not in pids
        readers.follow(coming := make_plan(4, first=12))
        while len(readers._batches) < 4:
            readers._receive(1.0)
        for request in coming:
            readers.take(request, raise_if_waiting)


def test_new_plan_keeps_what_it_shares_with_the_former_one() -> None:
    with reading(Pids, keep) as readers:
        plan = make_plan(8)
        readers.follow(plan)
        readers.take(plan[0], never)
        readers.follow([plan[2], *make_plan(3, first=50)])
        assert set(readers._wanted) <= {plan[2], *make_plan(3, first=50)}
        for request in (plan[2], *make_plan(3, first=50)):
            assert len(readers.take(request, never)) == 4
        assert not readers._wanted and not readers._batches, "nothing is kept that is not wanted"


def test_request_outside_of_the_plan_is_read_too() -> None:
    with reading(Numbers) as readers:
        readers.follow(make_plan(2))
        batch = readers.take(single(42)[0], never)
        assert batch["index"].tolist() == [42]


def test_read_ahead_is_limited_by_bytes() -> None:
    """A pass of the dataset has 1 MiB; after the first, one more is read ahead."""
    with reading(lambda: list(torch.zeros(100, 2**18)), max_mib=2, prefetch_factor=8) as readers:
        plan = single(*range(50))
        readers.follow(plan[:1])
        readers.take(plan[0], never)
        readers.follow(plan[1:])
        for request in plan[1:20]:
            readers.take(request, never)
            assert len(readers._wanted) <= 2


@pytest.mark.parametrize("what", ["die", "exit"])
def test_sample_that_kills_its_readers_is_named(what: str, capfd: Any) -> None:
    cause = "SIGSEGV" if what == "die" else "exit code 3"
    with reading(lambda: Bad(what)) as readers:
        plan = single(*range(10, 20))
        readers.follow(plan)
        for request in plan[:3]:
            readers.take(request, never)
        ended = f"sample {BAD_SAMPLE} of the dataset: 2 reader processes ended with {cause}"
        with pytest.raises(UserError, match=ended):
            readers.take(plan[3], never)
        assert int(readers.take(plan[4], never)) == 14
    assert f"ended with {cause}: replaced" in capfd.readouterr().out


def test_reader_that_dies_once_is_replaced(tmp_path: Path) -> None:
    with reading(lambda: Bad("die", tmp_path / "once")) as readers:
        plan = single(*range(10, 30))
        readers.follow(plan)
        assert [int(readers.take(r, never)) for r in plan] == list(range(10, 30))


def test_killed_readers_and_host_are_replaced() -> None:
    plan = single(*range(60))
    with reading(Numbers) as readers:
        readers.follow(plan)
        for number, request in enumerate(plan):
            assert readers.take(request, never)["index"].tolist() == [number]
            if number in (10, 20):
                pid = readers._readers[number % 4 // 2].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            if number == 40:
                os.kill(readers._host.pid, signal.SIGKILL)


def test_sample_that_raises_is_named_with_its_place() -> None:
    with reading(lambda: Bad("raise")) as readers:
        request = ((0, (1, BAD_SAMPLE, 2)),)
        with pytest.raises(UserError) as error:
            readers.take(request, never)
    assert str(error.value).startswith(f"sample {BAD_SAMPLE} of the dataset: ")
    assert "datasets_to_read.py" in str(error.value) and "KeyError: 'no label'" in str(error.value)


def test_sample_that_hangs_is_named() -> None:
    with reading(lambda: Bad("hang"), sample_timeout_s=0.5) as readers:
        request = single(BAD_SAMPLE)[0]
        with pytest.raises(UserError, match=f"sample {BAD_SAMPLE} .*reading.sample_timeout_s=0.5"):
            readers.take(request, never)


def test_failing_collate_names_no_sample() -> None:
    raises = pytest.raises(UserError, match=r"^the dataset: .*IndexError")
    with reading(Numbers, lambda items: items[7]) as readers, raises as error:
        readers.take(single(1)[0], never)
    assert "sample" not in str(error.value)


def test_dataset_that_cannot_be_opened_is_reported() -> None:
    raises = pytest.raises(UserError, match=r"the recipe's data: .*ZeroDivisionError")
    with reading(lambda: 1 / 0) as readers, raises:
        readers.take(single(1)[0], never)


def test_dataset_whose_opening_ends_the_host_is_reported() -> None:
    raises = pytest.raises(UserError, match=r"reader host ended with exit code 5 2 times")
    with reading(lambda: os._exit(5)) as readers, raises:
        readers.take(single(1)[0], never)


def test_dataset_that_cannot_be_pickled_is_refused() -> None:
    generator = (number for number in range(3))
    with pytest.raises(UserError, match=r"cannot be sent to reader processes .*num_readers=0"):
        Readers(PassReader(lambda: generator, keep), ReadingSettings(num_readers=1))


def test_function_for_new_readers_is_called_with_their_number() -> None:
    def begin(number: int) -> None:
        os.environ["READER"] = str(number)

    class Named(Numbers):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.01)
            return os.environ["READER"]

    plan = single(*range(8))
    with reading(Named, keep, begin) as readers:
        readers.follow(plan)
        assert {readers.take(request, never)[0] for request in plan} == {"0", "1"}


class Aborted(Exception):
    """The exception of an abort."""


def test_waiting_for_a_sample_can_be_interrupted() -> None:
    def abort() -> None:
        raise Aborted

    with reading(lambda: Bad("hang")) as readers:
        with pytest.raises(Aborted):
            readers.take(single(BAD_SAMPLE)[0], abort)
        assert int(readers.take(single(BAD_SAMPLE + 1)[0], never)) == BAD_SAMPLE + 1


def test_readers_die_with_their_worker(tmp_path: Path) -> None:
    """Even a reader that hangs in a sample, and without any action of the worker."""
    program = f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_readers import *
        readers = Readers(PassReader(lambda: Bad("hang"), keep), ReadingSettings(num_readers=2))
        readers.follow(single(1, 2, BAD_SAMPLE))
        readers.take(single(1)[0], never), readers.take(single(2)[0], never)
        print(readers._host.pid, *(reader.pid for reader in readers._readers), flush=True)
        time.sleep(1000)
    """
    worker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    pids = [int(word) for word in worker.stdout.readline().split()]
    processes = [psutil.Process(pid) for pid in pids]
    assert len(processes) == 3
    worker.kill()
    worker.wait()
    worker.stdout.close()
    wait_for_end(processes)


def wait_for_end(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 5.0
    while any(is_alive(process) for process in processes):
        assert time.monotonic() < deadline, "a reader has outlived its worker"
        time.sleep(0.01)


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs; the process that inherits an orphan may reap it late or never."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False
