"""Feed-forward layers: SwiGLU, and a mixture of SwiGLU experts."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional

from pipelines.settings import ExpertsSettings
from pipelines.training.models.expert_products import (
    has_grouped_kernel,
    multiply_in_groups,
    multiply_in_loop,
)
from pipelines.training.models.token_exchange import (
    Routing,
    count_choices,
    num_ranks,
    send_through_experts,
    send_to_experts_of,
)
from pipelines.training.workload.parallel_groups import ALONE, ParallelGroups


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, GLU variants, 2020): `w2(silu(w1 x) * w3 x)`."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.w2(functional.silu(self.w1(hidden)) * self.w3(hidden))
        return output


class MixtureOfExperts(nn.Module):
    """SwiGLU experts, of which each token uses `top_k`, and an optional shared expert.

    `forward(hidden, counted)` takes and returns (batch, length, dim); no token is dropped. The
    weights of the chosen experts are the softmax of their logits (Jiang et al., Mixtral, 2024).
    With gradients enabled the output carries the balance loss, see `_imbalance`. `counted` is False
    or 0 for a padding microbatch.

    `parallel` shards the experts over `ep` in equal chunks, and the microbatch's tokens over
    `sequence`. All ranks of these groups must call forward and backward together, even a rank
    without tokens.
    """

    def __init__(
        self, dim: int, settings: ExpertsSettings, parallel: ParallelGroups = ALONE
    ) -> None:
        super().__init__()
        self.settings = settings
        self.parallel = parallel
        self.router = nn.Linear(dim, settings.num_experts, bias=False)
        self.experts = Experts(settings.num_experts // parallel.num_ep, dim, settings.hidden_dim)
        shared_dim = settings.shared_hidden_dim
        self.shared = FeedForward(dim, shared_dim) if shared_dim else None
        # The number of tokens of an expert changes at each call and would cause recompilation.
        # As a decorator this would import the compiler in every command, which takes 1 s.
        self._uncompiled = torch.compiler.disable(MixtureOfExperts._mixed)

    def forward(self, hidden: Tensor, counted: bool | Tensor = True) -> Tensor:
        mixed: Tensor = self._uncompiled(self, hidden, counted)
        return mixed

    def _mixed(self, hidden: Tensor, counted: bool | Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        exact = torch.promote_types(tokens.dtype, torch.float32)
        logits = functional.linear(tokens.to(exact), _local_weight(self.router.weight).to(exact))
        best, chosen = logits.topk(self.settings.top_k)
        counts = count_choices(chosen, self.settings.num_experts)
        routing = Routing(counts, self.parallel.ep)
        # Before the experts, so that a GPU computes it while the host waits for the routing.
        shared = self.shared(hidden) if self.shared is not None else None
        outputs = self._chosen_outputs(tokens, chosen, routing)
        mixed = (outputs * best.softmax(-1)[..., None]).sum(1).to(hidden.dtype).view_as(hidden)
        if shared is not None:
            mixed = mixed + shared
        if torch.is_grad_enabled() and self.settings.balance_coefficient:
            mixed = _Attach.apply(mixed, self._imbalance(logits, counts) * counted)
        return mixed

    def _imbalance(self, logits: Tensor, counts: Tensor) -> Tensor:
        """This rank's summand of the microbatch's balance loss, shape ().

        The loss is `coefficient * num_experts * sum_e f_e P_e` (Fedus et al., Switch Transformer,
        2021, eq. 4 to 6), times the number of tokens, because token losses are summed too. `f_e` is
        the fraction of choices of expert e, `P_e` its mean probability.
        """
        counts = counts.clone()
        if num_ranks(self.parallel.sequence) > 1:
            dist.all_reduce(counts, group=self.parallel.sequence)
        sums = logits.softmax(-1).sum(0)
        fractions = counts.to(sums.dtype) / counts.sum().clamp(min=1)
        factor = self.settings.balance_coefficient * self.settings.num_experts
        return factor * (fractions @ sums)

    def _chosen_outputs(self, tokens: Tensor, chosen: Tensor, routing: Routing) -> Tensor:
        """The output of each chosen expert (tokens, k) for its token: (tokens, k, dim)."""

        def compute(rows: Tensor) -> Tensor:
            if num_ranks(routing.group) > 1:
                return send_through_experts(rows, routing, self.experts)
            outputs: Tensor = self.experts(rows, routing.counts)
            return outputs

        return send_to_experts_of(tokens, chosen, compute)


class Experts(nn.Module):
    """The experts of one rank: `w1` and `w3` (experts, hidden_dim, dim), `w2` (experts, dim,
    hidden_dim)."""

    def __init__(self, num_experts: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = _weights(num_experts, hidden_dim, dim)
        self.w2 = _weights(num_experts, dim, hidden_dim)
        self.w3 = _weights(num_experts, hidden_dim, dim)

    def forward(self, rows: Tensor, counts: Tensor, host_counts: list[int] | None = None) -> Tensor:
        """Send rows, sorted by expert with `counts` rows for each expert, through the experts.

        `host_counts` are the same numbers on the host, if it has them. Otherwise the loop, but not
        the grouped products, waits for the device.
        """
        weights = (self.w1, self.w2, self.w3)
        if has_grouped_kernel(rows, self.w1):
            return multiply_in_groups(rows, counts, *weights)
        if host_counts is None:
            host_counts = counts.tolist()
        return multiply_in_loop(rows, host_counts, *weights)


class _Attach(torch.autograd.Function):
    """Identity of the hidden states; in backward the attached loss gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        ctx.unit = torch.ones_like(loss)
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, ctx.unit


def _weights(num_experts: int, num_out: int, num_in: int) -> nn.Parameter:
    """A stack of matrices (out, in) with the initial values of `nn.Linear`."""
    bound = 1 / math.sqrt(num_in)
    return nn.Parameter(torch.empty(num_experts, num_out, num_in).uniform_(-bound, bound))


def _local_weight(weight: Tensor) -> Tensor:
    """The local tensor of a weight that `tp` replicates; its gradient is summed over `tp`, since
    each rank has only its own tokens."""
    if isinstance(weight, DTensor):
        return weight.to_local(grad_placements=[Partial()])
    return weight
