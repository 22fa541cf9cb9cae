"""Pipeline schedules, simulated: their order, their bubble, messages, and shared cores."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.planner.models.pipeline_schedule import Pipeline, actions_of, pipeline_seconds


def pipeline(schedule: str = "1f1b", pp: int = 4, vp: int = 1) -> Pipeline:
    """Stages that together take 3 s a rank: forward 1 s, backward 2 s."""
    num_stages = pp * vp
    return Pipeline(schedule, pp, (1 / vp,) * num_stages, (2 / vp,) * num_stages)


def test_last_rank_of_1f1b_alternates_from_the_start() -> None:
    first, last = (
        "".join("F" if a.is_forward else "B" for a in actions_of("1f1b", 4, 1, rank, 6))
        for rank in (0, 3)
    )
    assert (first, last) == ("FFFFBFBFBBBB", "FBFBFBFBFBFB")


def test_interleaved_rank_computes_each_microbatch_once_in_each_stage() -> None:
    for rank in range(2):
        actions = actions_of("interleaved_1f1b", 2, 3, rank, 4)
        assert len(set(actions)) == len(actions) == 2 * 3 * 4
        assert {action.stage % 2 for action in actions} == {rank}


@pytest.mark.parametrize(
    ("schedule", "vp", "bubble"),
    [("gpipe", 1, 3), ("1f1b", 1, 3), ("interleaved_1f1b", 2, 3 / 2)],
)
def test_bubble_is_that_of_the_papers(schedule: str, vp: int, bubble: float) -> None:
    for num_rounds in (4, 8, 80):
        seconds = pipeline_seconds(pipeline(schedule, vp=vp), num_rounds)
        assert seconds == pytest.approx(3 * (num_rounds + bubble))


def test_slowest_stage_sets_the_pace() -> None:
    uneven = replace(pipeline(pp=2), forward_s=(1.0, 2.0), backward_s=(2.0, 4.0))
    assert pipeline_seconds(uneven, 20) == pytest.approx(20 * 6 + 3)


def test_messages_delay_the_first_microbatch_and_the_steady_state() -> None:
    silent = pipeline_seconds(pipeline(), 16)
    delayed = pipeline_seconds(replace(pipeline(), message_s=0.1), 16) - silent
    assert 2 * 3 * 0.1 <= delayed <= 2 * (16 + 3) * 0.1
    gpipe = pipeline("gpipe")
    silent = pipeline_seconds(gpipe, 16)
    delayed = pipeline_seconds(replace(gpipe, message_s=0.1), 16) - silent
    assert delayed == pytest.approx(2 * 3 * 0.1), "later messages arrive before their turn"


def test_ranks_that_share_cores_fill_the_bubble_of_others() -> None:
    """Four ranks on two cores have 16 x 3 s x 4 of work: nearly all of the time both are busy."""
    seconds = pipeline_seconds(replace(pipeline(), cores=2), 16)
    assert 96 < seconds < 2 * pipeline_seconds(pipeline(), 16)
    assert seconds == pytest.approx(96, rel=0.05)
    alone = replace(pipeline(), cores=4)
    assert pipeline_seconds(alone, 16) == pytest.approx(pipeline_seconds(pipeline(), 16))
