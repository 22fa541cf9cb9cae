"""Bytes that a forward pass keeps for backward, by the mode of activation checkpointing."""

from __future__ import annotations

import pytest
import torch
from test_replica import CPU, local_tensors, program_of
from torch.multiprocessing.reductions import StorageWeakRef

from actors.distributed.torch_private import TorchDispatchMode
from pipelines.errors import UserError
from pipelines.run.recipes import tiny, tiny_moe
from pipelines.settings import DataSettings, TrainSettings
from pipelines.settings.bounds import Recomputation
from pipelines.training.passes.pass_size import PassObservations, PassSize
from pipelines.training.replica.warm_up import group_of_one
from pipelines.training.sharding.recomputation import recomputed
from pipelines.training.workload.trees import tensors_in

COMMON = {"data": DataSettings(source="random", seq_len=64), "batch": 16, "microbatch": 8}
RECIPES = {"dense": tiny, "experts": tiny_moe}


class RecordStorages(TorchDispatchMode):
    """Records the storages of the results of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        results = operator(*args, **(kwargs or {}))
        for result in tensors_in(results):
            storage = result.untyped_storage()
            self.num_bytes[StorageWeakRef(storage)] = storage.nbytes()
        return results

    def alive_bytes(self) -> int:
        return sum(size for storage, size in self.num_bytes.items() if not storage.expired())


def measure_kept_bytes(settings: TrainSettings) -> tuple[int, int]:
    """The bytes alive between forward and backward, and those that `PassSize` observes."""
    program = program_of(settings)
    observations = PassObservations()
    with group_of_one(CPU) as groups:
        replica = program.build(groups)
        replica.adopt(local_tensors(program, groups))
        [module] = replica.sharded.modules
        size = PassSize(program.workload, program.settings, groups, observations)
        tokens = torch.randint(0, settings.model.vocab_size, (8, 64))
        with RecordStorages() as recorded:
            with size.watched(module):
                output = module(tokens)
            alive_bytes = recorded.alive_bytes()
            output.sum().backward()
    [observation] = observations.by_layout.values()
    return alive_bytes, observation.kept_bytes


@pytest.mark.parametrize("kind", RECIPES)
def test_selective_keeps_more_than_full_and_less_than_none(kind: str) -> None:
    kept: dict[Recomputation, tuple[int, int]] = {}
    modes: tuple[Recomputation, ...] = ("none", "selective", "full")
    for mode in modes:
        changes = {**COMMON, "activation_checkpointing": mode}
        kept[mode] = measure_kept_bytes(RECIPES[kind]().model_copy(update=changes))
    alive = {mode: alive_bytes for mode, (alive_bytes, _) in kept.items()}
    assert 2 * alive["full"] < alive["selective"] < 0.7 * alive["none"]
    for mode in ("none", "selective"):
        alive_bytes, observed_bytes = kept[mode]
        assert observed_bytes == pytest.approx(alive_bytes, rel=0.2), mode


def run_selective(forward, weight: torch.Tensor) -> torch.Tensor:
    """The gradient of `weight` with selective checkpointing of `forward`."""
    selective = recomputed(forward, "selective")
    inputs = torch.ones(2, 3, dtype=weight.dtype, requires_grad=True)
    [gradient] = torch.autograd.grad(selective(inputs).sum(), weight)
    return gradient


def test_product_that_is_changed_in_place_is_refused() -> None:
    weight = torch.ones(3, 3, requires_grad=True)
    with pytest.raises(UserError, match=r"a result of aten\.mm\.default in place.*use `full`"):
        run_selective(lambda inputs: (inputs @ weight).add_(1).exp(), weight)


def test_kept_products_are_not_computed_again() -> None:
    weight = torch.rand(3, 3, dtype=torch.float64, requires_grad=True)
    products = []

    class CountProducts(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            products.append(operator is torch.ops.aten.mm.default)
            return operator(*args, **(kwargs or {}))

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        return (inputs @ weight).exp() @ weight

    expected = torch.autograd.grad(forward(torch.ones(2, 3, dtype=torch.float64)).sum(), weight)
    with CountProducts():
        gradient = run_selective(forward, weight)
    assert torch.equal(gradient, expected[0])
    assert sum(products) == 2 + 3, "two in forward, and the gradients of three factors"
