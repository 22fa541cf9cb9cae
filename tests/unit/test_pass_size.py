"""How many microbatches a pass has: by memory, by the setting, and only without random draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from actors.runtime.program import Groups
from elastic.geometry.layout import Layout
from pipelines.errors import UserError
from pipelines.settings import TrainSettings
from pipelines.training.passes import pass_size
from pipelines.training.passes.pass_size import KeptForBackward, PassObservations, PassSize
from pipelines.training.replica.warm_up import group_of_one
from pipelines.training.workload.data_shard import DataShard

CPU = torch.device("cpu")
SETTINGS = TrainSettings(batch=24, microbatch=2)
NUM_MICROBATCHES = 12


class Mergeable:
    """What `PassSize` reads of a workload."""

    why_unmergeable: str | None = None
    divides_draws: bool = False


class Unmergeable(Mergeable):
    why_unmergeable = "the loss returns a mean"


@pytest.fixture
def groups() -> Any:
    with group_of_one(CPU) as groups:
        yield groups


def set_free_bytes(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(pass_size, "free_bytes", lambda device: num_bytes)


def make_size(groups: Groups, workload: Any = None, **changes: Any) -> PassSize:
    settings = SETTINGS.model_copy(update=changes)
    return PassSize(workload or Mergeable(), settings, groups, PassObservations())


def observe(size: PassSize) -> None:
    """Run a pass that keeps 400 bytes for backward."""
    values = torch.ones(100, requires_grad=True)
    with size.watched(nn.Identity()):
        values.exp()


@pytest.mark.parametrize(
    ("free", "expected"), [(3 * 400, 1), (3 * 2000, 5), (10**9, NUM_MICROBATCHES)]
)
def test_size_is_what_fits_in_a_third_of_the_free_memory(
    groups: Groups, monkeypatch: pytest.MonkeyPatch, free: int, expected: int
) -> None:
    set_free_bytes(monkeypatch, free)
    size = make_size(groups)
    assert size.agree() == 1, "no pass has been observed"
    observe(size)
    assert size.agree() == expected
    set_free_bytes(monkeypatch, 0)
    assert size.agree() == expected, "ranks agree once in a generation"


@pytest.mark.parametrize(("most", "expected"), [(1, 1), (3, 1), (4, 2), (7, 3), (100, 12)])
def test_setting_caps_the_samples_of_a_pass(groups: Groups, most: int, expected: int) -> None:
    size = make_size(groups, pass_samples=most)
    observe(size)
    assert size.agree() == expected


def test_observations_outlive_a_generation(groups: Groups) -> None:
    observations = PassObservations()
    first = PassSize(Mergeable(), SETTINGS, groups, observations)
    observe(first)
    assert PassSize(Mergeable(), SETTINGS, groups, observations).agree() > 1


def test_checkpointed_activations_are_not_merged_by_memory_on_a_cpu(groups: Groups) -> None:
    size = make_size(groups, activation_checkpointing="full")
    observe(size)
    assert size.agree() == 1


def test_reason_for_single_microbatches_is_printed_once(
    groups: Groups, capsys: pytest.CaptureFixture[str]
) -> None:
    observations = PassObservations()
    for _ in range(2):
        size = PassSize(Unmergeable(), SETTINGS, groups, observations)
        observe(size)
        assert size.agree() == 1
    expected = "elastic: each pass has one microbatch: the loss returns a mean\n"
    assert capsys.readouterr().out == expected


def test_pass_that_draws_is_not_merged(groups: Groups, capsys: pytest.CaptureFixture[str]) -> None:
    size = make_size(groups)
    with size.watched(nn.Identity()):
        torch.rand(2)
    assert size.agree() == 1
    assert "a pass draws random numbers, as dropout does" in capsys.readouterr().out


def test_pass_that_draws_is_merged_if_each_microbatch_draws_apart(groups: Groups) -> None:
    workload = Mergeable()
    workload.divides_draws = True
    size = make_size(groups, workload)
    with size.watched(nn.Identity()):
        torch.rand(2)
    assert size.agree() == NUM_MICROBATCHES


def test_pass_that_updates_buffers_is_not_merged(groups: Groups) -> None:
    size = make_size(groups)
    observe(size)
    size.note_updated_buffers()
    assert size.agree() == 1


def test_draw_in_a_merged_pass_is_refused(groups: Groups) -> None:
    size = make_size(groups)
    observe(size)
    assert size.agree() > 1
    with pytest.raises(UserError, match="set pass_samples=2"), size.watched(nn.Identity()):
        torch.rand(2)


def test_parameters_are_not_counted_as_kept_for_backward() -> None:
    module = nn.Linear(10, 10, bias=False)
    values = torch.ones(5, 10)
    kept = KeptForBackward(module)
    with kept:
        module(module(values)).sum()
    assert kept.num_bytes == 2 * 5 * 10 * 4, "the two inputs of the layer"


@pytest.mark.parametrize("num_merged", [1, 2, 3, 12])
@pytest.mark.parametrize("num_ranks", [1, 2, 5, 7, 13])
def test_rounds_hold_each_microbatch_once(num_merged: int, num_ranks: int) -> None:
    of_ranks = [
        DataShard(rank, num_ranks).rounds(NUM_MICROBATCHES, lambda least: least, num_merged)
        for rank in range(num_ranks)
    ]
    assert len({len(rounds) for rounds in of_ranks}) == 1, "each rank runs as many passes"
    assert max(len(own) for rounds in of_ranks for own in rounds) <= num_merged
    flat = [number for rounds in of_ranks for own in rounds for number in own]
    assert sorted(flat) == list(range(NUM_MICROBATCHES))


@pytest.mark.parametrize("num_merged", [1, 3, 7])
def test_rounds_of_unequal_shares_hold_each_microbatch_once(num_merged: int) -> None:
    shares = (7, 3, 1, 1)
    of_ranks = [
        DataShard(rank, 4, shares).rounds(NUM_MICROBATCHES, lambda least: least, num_merged)
        for rank in range(4)
    ]
    assert {len(rounds) for rounds in of_ranks} == {-(-7 // num_merged)}
    assert [sum(map(len, rounds)) for rounds in of_ranks] == list(shares)
    flat = [number for rounds in of_ranks for own in rounds for number in own]
    assert flat == list(range(NUM_MICROBATCHES))


def test_pass_may_have_as_many_microbatches_as_the_largest_share(groups: Groups) -> None:
    assignment = replace(groups.assignment, layout=Layout(dp=2), members=("w0", "w1"))
    for shares, most in (((), 6), ((9, 3), 9)):
        dealt = replace(assignment, shares=shares)
        two = type(groups)(dealt, 0, CPU, groups.world, groups.mesh)
        size = PassSize(Mergeable(), SETTINGS, two, PassObservations())
        observe(size)
        assert size.agree() == most


def test_layout_with_stages_keeps_single_microbatches(groups: Groups) -> None:
    piped = replace(groups.assignment, layout=Layout(pp=2), members=("w0", "w1"))
    size = PassSize(
        Mergeable(),
        SETTINGS,
        type(groups)(piped, 0, CPU, groups.world, groups.mesh),
        PassObservations(),
    )
    assert size.agree() == 1
