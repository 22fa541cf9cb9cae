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
    microbatch: int = 1
    top_k: int = 0
    balance: float = 0.0


def train(plain, weights, batches):
    """The loss and gradient norm of each step; `weights` hold the final ones afterwards.

    A step whose batch is None is skipped.
    """
    parameters = [weight.requires_grad_() for weight in weights.values()]
    decayed = [p for p in parameters if p.ndim > 1]
    groups = [{"params": decayed, "weight_decay": plain.weight_decay}]
    groups += [{"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=plain.betas, eps=1e-8, foreach=False)
    losses_and_norms = []
    for lr, batch in zip(plain.lrs, batches, strict=True):
        if batch is None:
            losses_and_norms.append((None, None))
            continue
        tokens, targets = batch
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        predictions, imbalance = logits(plain, weights, tokens)
        loss = cross_entropy(predictions.flatten(0, 1), targets.flatten())
        (loss + plain.balance * imbalance).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, plain.max_grad_norm)
        optimizer.step()
        losses_and_norms.append((loss.item(), norm.item()))
    return losses_and_norms


def logits(plain, w, tokens):
    x, imbalance = w["embedding.weight"][tokens], 0.0
    for i in range(plain.num_layers):
        layer = {name.removeprefix(f"layers.{i}."): value for name, value in w.items()}
        x = x + attention(plain, layer, norm(plain, x, layer["attention_norm.weight"]))
        y = norm(plain, x, layer["feed_forward_norm.weight"])
        if plain.top_k:
            mixed, layer_imbalance = mixture(plain, layer, y)
            x, imbalance = x + mixed, imbalance + layer_imbalance
        else:
            x = x + swiglu(y, *(layer[f"feed_forward.w{n}.weight"] for n in (1, 2, 3)))
    return norm(plain, x, w["norm.weight"]) @ w["head.weight"].T, imbalance


def swiglu(x, w1, w2, w3):
    return (silu(x @ w1.T) * (x @ w3.T)) @ w2.T


def mixture(plain, layer, x):
    layer = {name.removeprefix("feed_forward."): value for name, value in layer.items()}
    probability = (x @ layer["router.weight"].T).softmax(-1)
    chosen = probability >= probability.sort(descending=True).values[..., plain.top_k - 1, None]
    share = probability * chosen / (probability * chosen).sum(-1, keepdim=True)
    w1, w2, w3 = (layer[f"experts.w{n}"] for n in (1, 2, 3))
    mixed = sum(share[..., e, None] * swiglu(x, w1[e], w2[e], w3[e]) for e in range(len(w1)))
    if "shared.w1.weight" in layer:
        mixed = mixed + swiglu(x, *(layer[f"shared.w{n}.weight"] for n in (1, 2, 3)))
    imbalances = []
    for i in range(0, len(x), plain.microbatch):
        load = chosen[i : i + plain.microbatch].to(x.dtype).mean((0, 1)) / plain.top_k
        mean_probability = probability[i : i + plain.microbatch].mean((0, 1))
        imbalances.append(len(load) * (load * mean_probability).sum())
    return mixed, torch.stack(imbalances).mean()


def norm(plain, x, weight):
    return rms_norm(x, weight.shape, weight, plain.eps)


def attention(plain, layer, x):
    q, k, v = (x @ layer[f"attention.{name}.weight"].T for name in ("wq", "wk", "wv"))
    size = q.shape[-1] // plain.num_heads
    q, k, v = (t.unflatten(-1, (-1, size)).transpose(1, 2) for t in (q, k, v))
    q, k = apply_rotary(plain, q), apply_rotary(plain, k)
    mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(-2) @ layer["attention.wo.weight"].T


def apply_rotary(plain, x):
    half = x.shape[-1] // 2
    frequency = plain.theta ** -(torch.arange(half, dtype=x.dtype) / half)
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * frequency
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1)
