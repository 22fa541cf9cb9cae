"""An independent oracle: a Llama-family model trained in one process by plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, silu


@dataclass(frozen=True)
class Plain:
    """The shape of the model and the hyperparameters of AdamW."""

    num_layers: int
    num_heads: int
    theta: float
    eps: float
    lrs: tuple[float, ...]
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float


def train(plain: Plain, weights: dict[str, Tensor], batches: Iterable[tuple[Tensor, Tensor]]):
    """Loss and gradient norm of each step; `weights` hold the final ones afterwards."""
    parameters = {name: weight.requires_grad_() for name, weight in weights.items()}
    matrices = [weight for weight in parameters.values() if weight.ndim > 1]
    vectors = [weight for weight in parameters.values() if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": plain.weight_decay}]
    groups += [{"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=plain.betas, eps=1e-8, foreach=False)
    seen = []
    for lr, (tokens, targets) in zip(plain.lrs, batches, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = cross_entropy(logits(plain, parameters, tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), plain.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return seen


def logits(plain: Plain, w: dict[str, Tensor], tokens: Tensor) -> Tensor:
    x = w["embedding.weight"][tokens]
    for i in range(plain.num_layers):
        layer = {name.removeprefix(f"layers.{i}."): value for name, value in w.items()}
        x = x + attention(plain, layer, rms_norm(plain, x, layer["attention_norm.weight"]))
        y = rms_norm(plain, x, layer["feed_forward_norm.weight"])
        gated = silu(y @ layer["feed_forward.w1.weight"].T) * (
            y @ layer["feed_forward.w3.weight"].T
        )
        x = x + gated @ layer["feed_forward.w2.weight"].T
    return rms_norm(plain, x, w["norm.weight"]) @ w["head.weight"].T


def rms_norm(plain: Plain, x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + plain.eps).sqrt()


def attention(plain: Plain, layer: dict[str, Tensor], x: Tensor) -> Tensor:
    length = x.shape[1]
    q, k, v = (x @ layer[f"attention.{name}.weight"].T for name in ("wq", "wk", "wv"))
    size = q.shape[-1] // plain.num_heads
    num_shared = q.shape[-1] // k.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    outputs = []
    for head in range(plain.num_heads):
        own, shared = head * size, head // num_shared * size
        query = turned(plain, q[..., own : own + size])
        key = turned(plain, k[..., shared : shared + size])
        scores = (query @ key.transpose(1, 2) / math.sqrt(size)).masked_fill(future, -math.inf)
        outputs.append(scores.softmax(-1) @ v[..., shared : shared + size])
    return torch.cat(outputs, -1) @ layer["attention.wo.weight"].T


def turned(plain: Plain, x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    position = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
    angle = position * plain.theta ** -(torch.arange(half, dtype=x.dtype) / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1)
