"""The one rule of recovery, in small."""

from __future__ import annotations

from elastic.geometry.errors import Infeasible
from elastic.geometry.layout import Coordinates, Layout
from elastic.geometry.tensor_specs import TensorSpec
from elastic.reshard.holdings import Holding, SourceChoice, Tier, any_state, choose, uncovered

SPECS = (
    TensorSpec("weight", (8, 4), fsdp_dim=0),
    TensorSpec("scale", (2,), fsdp_dim=0),
    TensorSpec("step", ()),
)
HSDP = Layout(dp=2, fsdp=2)


def held(
    tier: Tier, step: int, *ranks: int, generation: int = 1, history: int = 0
) -> list[Holding]:
    return [
        Holding(f"w{r}", tier, history, step, generation, HSDP, HSDP.coordinates(r)) for r in ranks
    ]


def chosen(*holdings: list[Holding]) -> SourceChoice:
    choice = choose(SPECS, [holding for group in holdings for holding in group])
    assert isinstance(choice, SourceChoice)
    return choice


def test_replicas_cover_for_each_other_across_replicas() -> None:
    choice = chosen(held(Tier.LIVE, 7, 0, 3))
    assert (choice.step, choice.tier, len(choice.holdings)) == (7, Tier.LIVE, 2)


def test_a_shard_that_nobody_has_sends_back_to_the_checkpoint() -> None:
    storage = [Holding("storage", Tier.CHECKPOINT, 0, 5, 1)]
    choice = chosen(held(Tier.LIVE, 7, 0, 2), storage)
    assert (choice.step, choice.tier, choice.holdings) == (5, Tier.CHECKPOINT, tuple(storage))


def test_a_newer_step_beats_a_nearer_tier() -> None:
    storage = [Holding("storage", Tier.CHECKPOINT, 0, 9, 1)]
    assert chosen(held(Tier.LIVE, 7, 0, 1), storage).step == 9


def test_the_nearer_tier_wins_at_one_step() -> None:
    storage = [Holding("storage", Tier.CHECKPOINT, 0, 7, 1)]
    assert chosen(storage, held(Tier.LIVE, 7, 0, 1)).tier is Tier.LIVE


def test_snapshots_fill_what_the_living_lack() -> None:
    choice = chosen(held(Tier.LIVE, 7, 0, 2), held(Tier.SNAPSHOT, 7, 1, 3))
    assert (choice.tier, len(choice.holdings)) == (Tier.SNAPSHOT, 4)


def test_two_histories_or_generations_do_not_combine() -> None:
    parts = held(Tier.LIVE, 7, 0), held(Tier.LIVE, 7, 1, history=3)
    refusal = choose(SPECS, [*parts[0], *parts[1]])
    assert isinstance(refusal, Infeasible)
    assert "'weight'" in refusal.reason and "step 7" in refusal.reason
    other = [*held(Tier.LIVE, 7, 0), *held(Tier.LIVE, 7, 1, generation=2)]
    assert isinstance(choose(SPECS, other), Infeasible)


def test_nothing_covers_nothing() -> None:
    assert isinstance(choose(SPECS, []), Infeasible)


def test_an_empty_region_need_not_be_held() -> None:
    scale = SPECS[1]
    assert uncovered([scale], Layout(fsdp=4), [0, 1]) is None
    assert uncovered([scale], Layout(fsdp=4), [0, 2, 3]) == scale


def test_any_state_needs_every_shard_of_every_stage() -> None:
    layout = Layout(pp=2, dp=2, fsdp=2, cp=2, tp=2)
    every = range(layout.num_workers)
    cover = [rank for rank in every if layout.coordinates(rank)[1::2] == (0, 1)]
    assert uncovered(any_state(layout), layout, cover) is None
    for missing in cover:
        left = [rank for rank in cover if rank != missing]
        assert uncovered(any_state(layout), layout, left) is not None


def test_coverage_of_many_workers_is_found_by_their_coordinates() -> None:
    layout = Layout(dp=1024, fsdp=16)
    without_shard_3 = [r for r in range(layout.num_workers) if layout.coordinates(r).fsdp != 3]
    assert uncovered(SPECS, layout, without_shard_3) == SPECS[0]
    one_more = layout.world_rank(Coordinates(dp=1000, fsdp=3))
    assert uncovered(SPECS, layout, [*without_shard_3, one_more]) is None
