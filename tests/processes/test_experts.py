"""A mixture of experts equals the plain loop, and is independent of its distribution."""

from __future__ import annotations

from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from expected import expected as train_plain_loop
from ranks import default_group, formed_groups, open_file_store
from test_replica import CPU, NUM_STEPS, Trained, program_of, train
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing import start_processes

from elastic.geometry.layout import Layout
from pipelines.run.recipes import tiny_moe
from pipelines.settings import DataSettings, ExpertsSettings
from pipelines.training.models.experts import MixtureOfExperts
from pipelines.training.replica.warm_up import group_of_one
from pipelines.training.workload.parallel_groups import ParallelGroups

SETTINGS = tiny_moe().model_copy(
    update={
        "data": DataSettings(source="random", seq_len=15),
        "dtype": "float64",
        "batch": 6,
        "microbatch": 2,
        "eval_every": 1,
        "eval_samples": 3,
    }
)
SHARDED = Layout(fsdp=2)
DIM = 8
EXPERTS = ExpertsSettings(
    num_experts=8, top_k=2, hidden_dim=5, shared_hidden_dim=3, balance_coefficient=0.3
)


class Spreading(NamedTuple):
    """The sizes of `cp` and `ep` in the mesh, and the axis that shards a microbatch."""

    num_cp: int
    num_ep: int
    sequence_axis: str

    @property
    def num_ranks(self) -> int:
        return self.num_cp * self.num_ep

    def microbatches(self) -> list[list[int]]:
        """The groups of ranks that share the tokens of a microbatch."""
        ranks = torch.arange(self.num_ranks).view(self.num_cp, self.num_ep)
        return (ranks.T if self.sequence_axis == "cp" else ranks).tolist()


SPREADINGS = {
    "ep2": Spreading(1, 2, "cp"),
    "ep4": Spreading(1, 4, "cp"),
    "cp4": Spreading(4, 1, "cp"),
    "cp2 x ep2": Spreading(2, 2, "cp"),
    "ep4 within a sequence": Spreading(1, 4, "ep"),
}
CASES = ("usual", "unused experts", "without tokens", "padding")


def assert_equals_plain_loop(trained: Trained, shards: list[dict[str, Tensor]]) -> None:
    losses_and_norms, weights = train_plain_loop(SETTINGS, NUM_STEPS)
    losses, norms = zip(*losses_and_norms, strict=True)
    assert trained.losses == pytest.approx(losses, rel=1e-9)
    assert trained.norms == pytest.approx(norms, rel=1e-9)
    for name, weight in weights.items():
        actual = torch.cat([shard[name] for shard in shards])
        torch.testing.assert_close(actual, weight.detach(), rtol=1e-9, atol=1e-12)
    assert losses[-1] < losses[0]


def test_one_process_equals_the_plain_loop() -> None:
    with group_of_one(CPU) as groups:
        trained = train(program_of(SETTINGS), groups)
    assert_equals_plain_loop(trained, [trained.tensors])


@pytest.mark.parametrize("change", ["microbatch", "balance_coefficient"])
def test_the_comparison_detects_another_weight_of_the_balance_loss(change: str) -> None:
    if change == "microbatch":
        other = SETTINGS.model_copy(update={"microbatch": 3})
    else:
        experts = SETTINGS.model.experts.model_copy(update={"balance_coefficient": 0.0101})
        model = SETTINGS.model.model_copy(update={"experts": experts})
        other = SETTINGS.model_copy(update={"model": model})
    [(loss, norm), (other_loss, other_norm)] = (
        train_plain_loop(settings, NUM_STEPS)[0][0] for settings in (SETTINGS, other)
    )
    assert other_loss == loss
    assert other_norm != pytest.approx(norm, rel=1e-8)


@pytest.mark.parametrize(
    "change",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        pytest.param({"compile": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_computation_settings_do_not_change_the_losses(change: dict[str, bool]) -> None:
    losses = []
    for settings in (SETTINGS, SETTINGS.model_copy(update=change)):
        with group_of_one(CPU) as groups:
            losses.append(train(program_of(settings), groups, num_steps=3).losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def build_unsharded(case: str) -> tuple[MixtureOfExperts, Tensor, Tensor]:
    """The unsharded module, the hidden states (4, 6, DIM) of four ranks, and their gradients."""
    torch.manual_seed(3)
    module = MixtureOfExperts(DIM, EXPERTS).double()
    hidden, gradient = torch.randn(2, 4, 6, DIM, dtype=torch.float64)
    if case == "unused experts":
        with torch.no_grad():
            module.router.weight[:2] += 1
            module.router.weight[2:] -= 1
        hidden = hidden / 4 + 1
    return module, hidden, gradient


def compute_gradients(
    module: MixtureOfExperts, hidden: Tensor, gradient: Tensor, counted: bool
) -> Any:
    """Run forward and backward; return the output and all gradients."""
    hidden = hidden.clone().requires_grad_()
    output = module(hidden, counted)
    output.backward(gradient)
    return {
        "output": output.detach(),
        "hidden": hidden.grad,
        **{name: parameter.grad for name, parameter in module.named_parameters()},
    }


def tokens_of(tensor: Tensor, rank: int, num_ranks: int, case: str) -> Tensor:
    """The tokens (1, any, DIM) of one rank; the last may have none."""
    tokens = tensor.flatten(0, 1)
    if case == "without tokens":
        chunks = [*tokens.chunk(num_ranks - 1), tokens[:0]]
    else:
        chunks = tokens.chunk(num_ranks)
    return chunks[rank][None]


def keep_expert_chunk(module: MixtureOfExperts, ep_rank: int, num_ep: int) -> None:
    """Keep this rank's chunk of the experts."""
    for name, weight in list(module.experts.named_parameters()):
        chunk = weight.detach().chunk(num_ep)[ep_rank].clone()
        setattr(module.experts, name, torch.nn.Parameter(chunk))


def run_rank(world_rank: int, folder: Path) -> None:
    """Run all cases in each distribution that has this rank."""
    torch.set_num_threads(1)
    store = open_file_store(folder, 4)
    for name, spreading in SPREADINGS.items():
        num_ranks = spreading.num_ranks
        if world_rank >= num_ranks:
            continue
        with default_group(store, name, world_rank, num_ranks):
            compute_cases(name, spreading, world_rank, folder)
    if world_rank < SHARDED.num_workers:
        # One rank has only one of three microbatches, so that its second round is padding.
        with formed_groups(SHARDED, store, "sharded", world_rank) as groups:
            trained = train(program_of(SETTINGS), groups)
        torch.save(trained._asdict(), folder / f"sharded-{world_rank}.pt")


def compute_cases(name: str, spreading: Spreading, world_rank: int, folder: Path) -> None:
    axes = {"mesh_dim_names": ("cp", "ep")}
    mesh = init_device_mesh("cpu", (spreading.num_cp, spreading.num_ep), **axes)
    for case in CASES:
        module, hidden, gradient = build_unsharded(case)
        keep_expert_chunk(module, mesh.get_local_rank("ep"), spreading.num_ep)
        module.parallel = ParallelGroups(
            sequence=mesh.get_group(spreading.sequence_axis), ep=mesh.get_group("ep")
        )
        num_ranks = spreading.num_ranks
        own_tokens = [
            tokens_of(tensor, world_rank, num_ranks, case) for tensor in (hidden, gradient)
        ]
        padding = case == "padding" and world_rank in spreading.microbatches()[-1]
        result = compute_gradients(module, *own_tokens, counted=not padding)
        torch.save(result, folder / f"{name}-{case}-{world_rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    set_forkserver_preload(["pipelines.run.program"])
    start_processes(run_rank, (folder,), 4, start_method="forkserver")
    return folder


def test_shards_with_an_empty_round_equal_the_plain_loop(folder: Path) -> None:
    ranks = [
        Trained(**torch.load(folder / f"sharded-{rank}.pt", weights_only=False))
        for rank in range(SHARDED.num_workers)
    ]
    for trained in ranks:
        assert_equals_plain_loop(trained, [rank.tensors for rank in ranks])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", SPREADINGS)
def test_every_distribution_computes_the_same(folder: Path, name: str, case: str) -> None:
    spreading = SPREADINGS[name]
    num_ranks, num_ep = spreading.num_ranks, spreading.num_ep
    ranks = [torch.load(folder / f"{name}-{case}-{rank}.pt") for rank in range(num_ranks)]
    module, hidden, gradient = build_unsharded(case)
    for number, sharing_ranks in enumerate(spreading.microbatches(), start=1):
        padding = case == "padding" and number == len(spreading.microbatches())
        tokens, gradients = (
            torch.cat([tokens_of(tensor, rank, num_ranks, case) for rank in sharing_ranks], 1)
            for tensor in (hidden, gradient)
        )
        expected = compute_gradients(module, tokens, gradients, counted=not padding)
        for key in ("output", "hidden"):
            actual = torch.cat([ranks[rank][key] for rank in sharing_ranks], 1)
            torch.testing.assert_close(actual, expected[key], rtol=1e-11, atol=1e-13)
    for key, parameter in module.named_parameters():
        if key.startswith("experts."):
            columns = [ranks[column::num_ep] for column in range(num_ep)]
            actual = torch.cat([sum(rank[key] for rank in column) for column in columns])
        else:
            actual = sum(rank[key] for rank in ranks)
        torch.testing.assert_close(actual, parameter.grad, rtol=1e-11, atol=1e-13)
    assert bool(module.experts.w1.grad[2:].any()) != (case == "unused experts")
