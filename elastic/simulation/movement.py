"""How many bytes a reshard moves, from the real transfers of a uniform state."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.tensor_specs import TensorSpec
from elastic.reshard.reshard_plan import ReshardPlan
from elastic.reshard.transfers import ShardHolders, shard_exchange_of

LAYERS_PER_STAGE = 4


@dataclass(frozen=True, slots=True)
class Movement:
    """The bytes of a reshard by participant, in the order of the plan's participants.

    `received` comes from other workers, `needed` is what a worker will hold and does not hold yet.
    """

    received: tuple[int, ...]
    needed: tuple[int, ...]
    busiest_sender: int

    @property
    def busiest(self) -> int:
        """The most bytes that one worker sends or receives."""
        return max(self.busiest_sender, *self.received)


def uniform_specs(state_bytes: int, target_layout: TargetLayout) -> tuple[TensorSpec, ...]:
    """A state of this size that every axis but `dp` and `cp` cuts evenly."""
    num_stages = target_layout.pp * target_layout.vp
    if num_stages == 1:
        return (TensorSpec("state", (max(1, state_bytes),), "uint8", fsdp_dim=0, tp_dim=0),)
    num_layers = LAYERS_PER_STAGE * num_stages
    size = max(1, state_bytes // num_layers)
    return tuple(
        TensorSpec(
            f"layer {layer}",
            (size,),
            "uint8",
            layer,
            fsdp_dim=0,
            tp_dim=0,
            layer_costs=(1,) * num_layers,
        )
        for layer in range(num_layers)
    )


def movement_of(plan: ReshardPlan, specs: tuple[TensorSpec, ...]) -> Movement:
    """The bytes that each participant of a plan receives and needs."""
    holders = ShardHolders.of(plan)
    participants = plan.participants
    received, needed = [0] * len(participants), [0] * len(participants)
    sent = [0] * len(participants)
    for spec in specs:
        for index, worker in enumerate(participants):
            exchange = shard_exchange_of(spec, plan, holders, holders.this_worker(plan, worker))
            received[index] += exchange.num_moved * spec.itemsize_bytes
            needed[index] += exchange.num_needed * spec.itemsize_bytes
            for region, *_ in exchange.sends:
                sent[index] += region.num_elements * spec.itemsize_bytes
    return Movement(tuple(received), tuple(needed), max(sent, default=0))
