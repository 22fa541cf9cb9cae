"""The recovery rule on a small model: which holdings the run continues from."""

from __future__ import annotations

from elastic.geometry.errors import Infeasible
from elastic.geometry.layout import Coordinates, Layout
from elastic.geometry.tensor_specs import TensorSpec
from elastic.reshard.holdings import (
    Holding,
    SourceChoice,
    Tier,
    choose,
    substitute_specs,
    uncovered,
)

SPECS = (
    TensorSpec("weight", (8, 4), fsdp_dim=0),
    TensorSpec("scale", (2,), fsdp_dim=0),
    TensorSpec("step", ()),
)
HSDP = Layout(dp=2, fsdp=2)


def make_holdings(
    tier: Tier, step: int, *ranks: int, generation: int = 1, lineage: int = 0
) -> list[Holding]:
    return [
        Holding(f"w{r}", tier, lineage, step, generation, HSDP, HSDP.coordinates(r)) for r in ranks
    ]


def choose_from(*holdings: list[Holding]) -> SourceChoice:
    choice = choose(SPECS, [holding for group in holdings for holding in group])
    assert isinstance(choice, SourceChoice)
    return choice


def test_shards_of_different_replicas_combine() -> None:
    choice = choose_from(make_holdings(Tier.LIVE, 7, 0, 3))
    assert (choice.step, choice.tier, len(choice.holdings)) == (7, Tier.LIVE, 2)


def test_missing_shard_falls_back_to_the_checkpoint() -> None:
    storage = [Holding("storage", Tier.CHECKPOINT, 0, 5, 1)]
    choice = choose_from(make_holdings(Tier.LIVE, 7, 0, 2), storage)
    assert (choice.step, choice.tier, choice.holdings) == (5, Tier.CHECKPOINT, tuple(storage))


def test_newer_step_wins_over_nearer_tier() -> None:
    storage = [Holding("storage", Tier.CHECKPOINT, 0, 9, 1)]
    assert choose_from(make_holdings(Tier.LIVE, 7, 0, 1), storage).step == 9


def test_nearer_tier_wins_at_the_same_step() -> None:
    storage = [Holding("storage", Tier.CHECKPOINT, 0, 7, 1)]
    assert choose_from(storage, make_holdings(Tier.LIVE, 7, 0, 1)).tier is Tier.LIVE


def test_snapshots_complete_live_holdings() -> None:
    choice = choose_from(make_holdings(Tier.LIVE, 7, 0, 2), make_holdings(Tier.SNAPSHOT, 7, 1, 3))
    assert (choice.tier, len(choice.holdings)) == (Tier.SNAPSHOT, 4)


def test_holdings_of_two_lineages_or_generations_do_not_combine() -> None:
    parts = make_holdings(Tier.LIVE, 7, 0), make_holdings(Tier.LIVE, 7, 1, lineage=3)
    refusal = choose(SPECS, [*parts[0], *parts[1]])
    assert isinstance(refusal, Infeasible)
    assert "'weight'" in refusal.reason and "step 7" in refusal.reason
    two_generations = [
        *make_holdings(Tier.LIVE, 7, 0),
        *make_holdings(Tier.LIVE, 7, 1, generation=2),
    ]
    assert isinstance(choose(SPECS, two_generations), Infeasible)


def test_no_holdings_are_infeasible() -> None:
    assert isinstance(choose(SPECS, []), Infeasible)


def test_empty_region_needs_no_holder() -> None:
    scale = SPECS[1]
    assert uncovered([scale], Layout(fsdp=4), [0, 1]) is None
    assert uncovered([scale], Layout(fsdp=4), [0, 2, 3]) == scale


def test_any_state_needs_every_shard_of_every_stage() -> None:
    layout = Layout(pp=2, dp=2, fsdp=2, cp=2, tp=2)
    all_ranks = range(layout.num_workers)
    cover = [rank for rank in all_ranks if layout.coordinates(rank)[1::2] == (0, 1)]
    assert uncovered(substitute_specs(layout), layout, cover) is None
    for missing in cover:
        remaining = [rank for rank in cover if rank != missing]
        assert uncovered(substitute_specs(layout), layout, remaining) is not None


def test_coverage_of_16384_workers_is_computed_by_coordinates() -> None:
    layout = Layout(dp=1024, fsdp=16)
    without_shard_3 = [r for r in range(layout.num_workers) if layout.coordinates(r).fsdp != 3]
    assert uncovered(SPECS, layout, without_shard_3) == SPECS[0]
    one_more = layout.world_rank(Coordinates(dp=1000, fsdp=3))
    assert uncovered(SPECS, layout, [*without_shard_3, one_more]) is None
