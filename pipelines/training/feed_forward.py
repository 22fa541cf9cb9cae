"""What a layer computes of each token alone: SwiGLU."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, GLU variants, 2020): `w2(silu(w1 x) * w3 x)`."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(hidden)) * self.w3(hidden))
