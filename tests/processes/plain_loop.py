"""An independent oracle: a Llama-family model trained in one process by plain PyTorch."""

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention, silu


@dataclass(frozen=True)
class Plain:
    num_layers: int
    num_heads: int
    theta: float
    eps: float
    lrs: tuple[float, ...]
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float


def train(plain, weights, batches):
    """The loss and gradient norm of each step; `weights` hold the final ones afterwards."""
    parameters = [weight.requires_grad_() for weight in weights.values()]
    decayed = [p for p in parameters if p.ndim > 1]
    groups = [{"params": decayed, "weight_decay": plain.weight_decay}]
    groups += [{"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=plain.betas, eps=1e-8, foreach=False)
    seen = []
    for lr, (tokens, targets) in zip(plain.lrs, batches, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss = cross_entropy(logits(plain, weights, tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, plain.max_grad_norm)
        optimizer.step()
        seen.append((loss.item(), norm.item()))
    return seen


def logits(plain, w, tokens):
    x = w["embedding.weight"][tokens]
    for i in range(plain.num_layers):
        layer = {name.removeprefix(f"layers.{i}."): value for name, value in w.items()}
        x = x + attention(plain, layer, norm(plain, x, layer["attention_norm.weight"]))
        y = norm(plain, x, layer["feed_forward_norm.weight"])
        w1, w2, w3 = (layer[f"feed_forward.w{n}.weight"].T for n in (1, 2, 3))
        x = x + (silu(y @ w1) * (y @ w3)) @ w2
    return norm(plain, x, w["norm.weight"]) @ w["head.weight"].T


def norm(plain, x, weight):
    return rms_norm(x, weight.shape, weight, plain.eps)


def attention(plain, layer, x):
    q, k, v = (x @ layer[f"attention.{name}.weight"].T for name in ("wq", "wk", "wv"))
    size = q.shape[-1] // plain.num_heads
    q, k, v = (t.unflatten(-1, (-1, size)).transpose(1, 2) for t in (q, k, v))
    q, k = turned(plain, q), turned(plain, k)
    mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(-2) @ layer["attention.wo.weight"].T


def turned(plain, x):
    half = x.shape[-1] // 2
    frequency = plain.theta ** -(torch.arange(half, dtype=x.dtype) / half)
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * frequency
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1)
