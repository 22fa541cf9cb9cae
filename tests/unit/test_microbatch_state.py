"""`run.state`: what each microbatch passes on to the same one of the next step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from pipelines.loop import Run
from pipelines.loop.script import script_of
from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.state.microbatch_state import CarriedTensor, MicrobatchStates
from pipelines.training.replica.warm_up import group_of_one

CPU = torch.device("cpu")


def begun(first: Tensor, num_microbatches: int = 3) -> tuple[MicrobatchStates, CarriedTensor]:
    states = MicrobatchStates()
    state = states.add(first)
    states.begin(num_microbatches)
    states.begin_step()
    return states, state


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_packed_bytes_of_two_workers_add_up_to_what_both_have_set(dtype: torch.dtype) -> None:
    values = torch.tensor([[0, 1], [1, 0], [1, 1]]).to(dtype)
    if dtype.is_floating_point:
        values *= -1.5
    workers = [begun(torch.zeros(2, dtype=dtype)) for _ in range(2)]
    for number, value in enumerate(values):
        states, state = workers[number % 2]
        states.begin_microbatch(number, dtype, CPU)
        state.value = value
    is_set, content = (sum(part) for part in zip(*(s.packed() for _, s in workers), strict=True))
    for _, state in workers:
        assert torch.equal(state.rows, torch.zeros(3, 2, dtype=dtype)), "of the step before"
        state.take(is_set, content)
        assert torch.equal(state.rows, torch.zeros(3, 2, dtype=dtype)), "the step may be skipped"
        state.commit()
        assert torch.equal(state.rows, values)


def test_microbatch_that_sets_nothing_keeps_its_value() -> None:
    states, state = begun(torch.ones(2))
    states.begin_microbatch(1, torch.float32, CPU)
    state.value = torch.zeros(2)
    state.take(*state.packed())
    state.commit()
    assert state.rows.tolist() == [[1, 1], [0, 0], [1, 1]]


def test_workers_that_compute_the_same_microbatches_count_once() -> None:
    """As the ranks of `tp`: their bytes would be added up."""
    states, state = begun(torch.zeros(2))
    states.begin_microbatch(1, torch.float32, CPU)
    state.value = torch.ones(2)
    with group_of_one(CPU) as groups:
        states.gather(groups, False, lambda: None)
        states.commit()
        assert not state.rows.any(), "another rank of the group counts"
        state.value = torch.ones(2)
        states.gather(groups, True, lambda: None)
        states.commit()
    assert state.rows.tolist() == [[0, 0], [1, 1], [0, 0]]


def test_value_is_detached_and_a_copy_in_the_run_dtype() -> None:
    states, state = begun(torch.zeros(2))
    states.begin_microbatch(0, torch.float64, CPU)
    read = state.value
    assert read.dtype == torch.float64
    read += 1
    assert not state.value.any()
    state.value = torch.ones(2, requires_grad=True) * 2
    assert not state.own[0].requires_grad and state.own[0].dtype == torch.float32


def test_padding_reads_a_value_and_sets_nothing() -> None:
    states, state = begun(torch.ones(2))
    states.begin_microbatch(None, torch.float32, CPU)
    assert state.value.tolist() == [1, 1]
    state.value = torch.zeros(2)
    assert not state.own


def test_use_outside_of_a_microbatch_and_other_shapes_are_refused() -> None:
    states, state = begun(torch.ones(2))
    with pytest.raises(LoopMisused, match=r"use it in `for \.\.\. in step\.batches\(\)`"):
        print(state.value)
    states.begin_microbatch(0, torch.float32, CPU)
    with pytest.raises(LoopMisused, match=r"shape \(3,\); it needs that of the first one, \(2,\)"):
        state.value = torch.ones(3)
    states.end_step()
    with pytest.raises(LoopMisused, match="is that of a microbatch"):
        state.value = torch.ones(2)
    with pytest.raises(LoopMisused, match="got int; pass the tensor"):
        states.add(3)  # type: ignore[arg-type]


def test_other_number_of_microbatches_is_refused() -> None:
    states, _ = begun(torch.ones(2))
    states.refuse_other_number(3)
    with pytest.raises(
        LoopMisused, match="declares 3 microbatches a step, but the settings make 4"
    ):
        states.refuse_other_number(4)


def script(run: Run, shuffle: bool = False) -> None:
    model = nn.Linear(2, 1)
    data = TensorDataset(torch.zeros(12, 2))
    loader: DataLoader[Any] = DataLoader(data, batch_size=2, shuffle=shuffle)
    run.prepare(model, SGD(model.parameters(), lr=0.1), loader)
    run.state(torch.zeros(2))
    for _ in run.steps(2, microbatches=3):
        pass


def test_shuffled_data_are_refused() -> None:
    assert script_of(script).settings.num_microbatches == 3
    with pytest.raises(LoopMisused, match="the samples are shuffled"):
        script_of(lambda run: script(run, shuffle=True))
