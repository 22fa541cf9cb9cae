"""Custom training loops: their steps, errors of misuse, and the objects that they may prepare."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from pipelines.loop import Run, Step
from pipelines.loop.loop import Loop
from pipelines.loop.prepared.optimizer_factory import ScriptOptimizerFactory
from pipelines.loop.script import script_of
from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.step import Position
from pipelines.training.workload.workload import LossSums


class Microbatch(NamedTuple):
    value: Any
    num_samples: int


class ListEngine:
    """An engine that takes microbatches from a list and records the counts of losses."""

    def __init__(self, *microbatches: Microbatch) -> None:
        self.microbatches = list(microbatches)
        self.num_microbatches = len(microbatches)
        self.counts: list[float] = []
        self.is_left = False

    def next(self) -> Microbatch:
        return self.microbatches.pop(0)

    def forwarded(self, count: Tensor) -> None:
        self.counts.append(float(count))

    def called(self) -> None:
        """Nothing changes buffers here."""

    def all_backwarded(self) -> None:
        """Nothing changes buffers here."""

    def left(self) -> None:
        self.is_left = True


def make_loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(10, 2)), batch_size=2, shuffle=True)


def declare(run: Run) -> Any:
    model = nn.Linear(2, 1)
    return run.prepare(model, SGD(model.parameters(), lr=0.5), make_loader())


def loop_of(body: Callable[[Step], None]) -> Loop:
    """A loop with this body of each step."""

    def script(run: Run) -> None:
        declare(run)
        for step in run.steps(3):
            with step:
                body(step)

    return Loop(script, 0)


MODULE = nn.Linear(2, 1)


def compute(step: Step) -> None:
    """The body of a step, without a model."""
    for points in step.batches():
        step.backward(points.sum() * torch.ones((), requires_grad=True))


def take(
    loop: Loop,
    number: int = 1,
    commits: bool = True,
    module: nn.Module = MODULE,
    engine: ListEngine | None = None,
) -> list[LossSums]:
    """Run a step, and let it commit and the script go on to its next body."""
    points = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    engine = engine or ListEngine(Microbatch(points, 2), Microbatch(points, 0))
    loop.begin(number, Position(), lambda: loop.state.kept())
    while not loop.await_arrival():
        """It begins again."""
    sums = loop.compute(engine, module)
    if commits:
        loop.commit(number, Position(), is_last=False, loss=0.0)
        loop.await_arrival()
    return sums


def test_step_returns_the_loss_sums_of_its_body() -> None:
    """Means become sums; a padding microbatch counts zero and has no gradient."""
    weight = torch.ones(2, requires_grad=True)

    def body(step: Step) -> None:
        for points in step.batches():
            step.backward((points @ weight).mean())

    sums = take(loop_of(body))
    assert [(float(part.loss), int(part.num_tokens)) for part in sums] == [(10.0, 2), (0.0, 0)]
    assert weight.grad is not None and weight.grad.tolist() == [4.0, 6.0]


def test_microbatch_says_how_many_samples_count() -> None:
    seen: list[int] = []

    def body(step: Step) -> None:
        for points in step.batches():
            step.backward(points.sum() * torch.ones((), requires_grad=True))
            seen.append(step.num_samples)
        if step.number == 2:
            step.num_samples  # noqa: B018

    loop = loop_of(body)
    take(loop)
    assert seen == [2, 0], "the second one is padding"
    with pytest.raises(LoopMisused, match=r"step 2: `step.num_samples` is of a microbatch"):
        take(loop, 2)


def test_code_after_the_block_sees_whether_the_step_committed() -> None:
    observed_commits = SimpleQueue[tuple[int, bool]]()  # a list would be set back

    def script(run: Run) -> None:
        declare(run)
        for step in run.steps(3):
            with step:
                compute(step)
            observed_commits.put((step.number, step.committed))

    loop = Loop(script, 0)
    for number, commits in ((1, True), (2, False), (2, True), (3, True)):
        take(loop, number, commits)
    observed = [observed_commits.get_nowait() for _ in range(4)]
    assert observed == [(1, True), (2, False), (2, True), (3, True)]


def leave_microbatches_unread(step: Step) -> None:
    for _ in step.batches():
        break


def call_no_backward(step: Step) -> None:
    for _ in step.batches():
        pass


def call_backward_twice(step: Step) -> None:
    for points in step.batches():
        loss = points.sum() * torch.ones((), requires_grad=True)
        step.backward(loss)
        step.backward(loss)


def call_backward_with_a_tensor(step: Step) -> None:
    for points in step.batches():
        step.backward(points)


def swallow_an_exception(step: Step) -> None:
    try:
        for _ in step.batches():
            raise ValueError("mine")
    except ValueError:
        pass


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (leave_microbatches_unread, "a microbatch got no `step.backward"),
        (call_no_backward, "a microbatch got no `step.backward"),
        (call_backward_twice, "once for each of"),
        (call_backward_with_a_tensor, "pass its mean, one number"),
        (swallow_an_exception, "a microbatch got no `step.backward"),
        (lambda step: None, "2 of this worker's 2 microbatches were not read"),
    ],
)
def test_misused_step_is_a_one_line_error(body: Callable[[Step], None], message: str) -> None:
    loop = loop_of(body)
    for number in (7, 7):  # the second time the loop receives the same step again
        with pytest.raises(LoopMisused, match=message) as raised:
            take(loop, number)
        assert "step 7" in str(raised.value) and "\n" not in str(raised.value)


def test_script_without_a_step_is_an_error() -> None:
    def enters_no_step(run: Run) -> None:
        declare(run)
        for _ in run.steps(3):
            pass

    with pytest.raises(LoopMisused, match="write `with step:`"):
        take(Loop(enters_no_step, 0))
    with pytest.raises(LoopMisused, match=r"run\.steps\(num_steps\)"):
        script_of(declare)


def test_take_raises_the_exception_of_the_script() -> None:
    def raises(step: Step) -> None:
        raise KeyError("mine")

    def exits(step: Step) -> None:
        raise SystemExit(3)

    with pytest.raises(KeyError, match="mine"):
        take(loop_of(raises))
    with pytest.raises(LoopMisused, match=r"test_loop\.py, line \d+: sys\.exit\(3\) in the loop"):
        take(loop_of(exits))


def test_script_reports_once_what_it_carries_without_keeping_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def script(run: Run) -> None:
        declare(run)
        hidden, kept = torch.zeros(3), run.keep(torch.zeros(3))
        for step in run.steps(4):
            with step:
                compute(step)
            hidden += 1
            kept += 1

    loop = Loop(script, 0)
    loop.is_first_worker = True
    for number in (1, 2, 3):
        take(loop, number)
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("elastic: hidden: the script changes it from step to step")


def test_stuck_script_is_abandoned_and_restarted() -> None:
    """A new thread computes; the stuck one ends when it returns."""
    is_stuck, may_continue, started, ended = threading.Event(), threading.Event(), [], []

    def script(run: Run) -> None:
        number = len(started)
        started.append(number)
        declare(run)
        try:
            for step in run.steps(3):
                with step:
                    if number == 0:
                        is_stuck.set()
                        may_continue.wait()
                    compute(step)
        finally:
            ended.append(number)

    loop = Loop(script, 0)
    stuck_thread = threading.Thread(target=lambda: take(loop, commits=False), daemon=True)
    stuck_thread.start()
    assert is_stuck.wait(10) and loop.is_busy
    assert len(take(loop)) == 2
    assert started == [0, 1]
    may_continue.set()
    stuck_thread.join(10)
    deadline = time.monotonic() + 10
    while ended != [0] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == [0]


LOOPS_AT_EXIT = """
import torch
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
from pipelines.loop.loop import Loop

def script(run):
    held = [torch.ones(1) for _ in range(100_000)]
    model = torch.nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2, shuffle=True)
    run.prepare(model, SGD(model.parameters(), lr=0.5), loader)
    for step in run.steps(3):
        held.clear()

loops = [Loop(script, 0) for _ in range(4)]
"""


@pytest.mark.parametrize("end", ["", "del loops"])
def test_process_with_waiting_or_abandoned_loops_exits_cleanly(end: str) -> None:
    """A thread that frees tensors while the interpreter exits would abort the process."""
    finished = subprocess.run(
        [sys.executable, "-c", LOOPS_AT_EXIT + end],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (finished.returncode, finished.stderr) == (0, "")


def train_four_steps(
    optimizer: torch.optim.Optimizer, schedule: Any, weight: Tensor
) -> list[float]:
    values = []
    for _ in range(4):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        if schedule:
            schedule.step()
        values.append(float(weight.detach().sum()))
    return values


@pytest.mark.parametrize("kind", [SGD, Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_optimizer_and_schedule_step_shards_like_whole_parameters(kind: Any) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = kind([{"params": [model.weight], "weight_decay": 0.1}], lr=0.3)
    scheduler = LambdaLR(optimizer, lambda step: (step + 1) / 3)
    names = {parameter: name for name, parameter in model.named_parameters()}
    factory = ScriptOptimizerFactory([optimizer], [scheduler], names, None)
    shard = model.weight.detach().clone()
    shard_optimizer = factory.build([("weight", shard)])
    shard_sums = []
    for step in range(1, 5):
        shard.grad = torch.ones_like(shard)
        factory.schedule(step, shard_optimizer.param_groups)
        shard_optimizer.step()
        scheduler.step()
        factory.values.keep()
        shard_sums.append(float(shard.sum()))
    plain = kind([{"params": [model.weight], "weight_decay": 0.1}], lr=0.3)
    plain_scheduler = LambdaLR(plain, lambda step: (step + 1) / 3)
    assert shard_sums == pytest.approx(
        train_four_steps(plain, plain_scheduler, model.weight), rel=1e-6
    )


def test_error_that_was_ignored_is_raised_at_the_next_use() -> None:
    def script(run: Run) -> None:
        declare(run)
        for step in run.steps(3):
            with step:
                compute(step)
            raise OSError("the disk is full")

    loop = Loop(script, 0)
    with pytest.raises(OSError, match="disk is full"):
        take(loop)
    with pytest.raises(OSError, match="disk is full"):
        loop.await_arrival()


def test_exception_of_an_inner_loop_does_not_count_as_leaving_the_steps() -> None:
    """Its iterator raises at an instruction that may also drop the iterator of the steps."""

    def script(run: Run) -> None:
        declare(run)
        for step in run.steps(3):
            for _ in (1 / zero for zero in [0]):
                pass
            with step:
                pass

    with pytest.raises(ZeroDivisionError):
        take(Loop(script, 0))


def test_script_that_leaves_its_loop_before_its_first_step_is_refused() -> None:
    def script(run: Run) -> None:
        declare(run)
        for _ in run.steps(3):
            break

    with pytest.raises(LoopMisused, match="leaves its loop before its first step"):
        take(Loop(script, 0))
