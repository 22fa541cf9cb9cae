"""A small language model on streamed text, trained by Muon and AdamW; see docs/imperative.md."""

import math

import torch
from pipelines.api import ElasticTrainer
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, IterableDataset

NUM_STEPS, WARM_UP = 36, 6
LENGTH, WIDTH, NUM_HEADS = 32, 32, 4


class Sums(IterableDataset):
    """Windows of a text of sums, one after another."""

    def __iter__(self):
        text = b""
        for number in range(100_000):
            text += f"{number % 97} + {number % 89} = {number % 97 + number % 89}\n".encode()
            while len(text) > LENGTH:
                yield torch.tensor(list(text[: LENGTH + 1]))
                text = text[LENGTH:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden):
        parts = self.qkv(self.norms[0](hidden)).unflatten(-1, (3, NUM_HEADS, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(self.up(self.norms[1](hidden)).relu().square())


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 128, bias=False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def rate(step):
    """The learning rate of a step, counted from 0: linear warm-up, then a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 + 0.5 * math.cos(math.pi * (step - WARM_UP) / (NUM_STEPS - WARM_UP))


def main(run):
    torch.manual_seed(42)
    model = LanguageModel()
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=0.02)
    adamw = torch.optim.AdamW(others, lr=0.01)
    loader = DataLoader(Sums(), batch_size=4)
    model, muon, adamw, loader = run.prepare(model, muon, adamw, loader)

    for step in run.steps(NUM_STEPS, microbatches=6):
        muon.param_groups[0]["lr"] = 0.02 * rate(step.number - 1)
        adamw.param_groups[0]["lr"] = 0.01 * rate(step.number - 1)
        with step:
            for tokens in step.batches():
                logits = model(tokens[:, :-1]).flatten(0, 1)
                loss = cross_entropy(logits, tokens[:, 1:].flatten())
                step.backward(loss)
                accuracy = (logits.argmax(-1) == tokens[:, 1:].flatten()).float().mean()
                step.report(accuracy=accuracy)
            for optimizer in (muon, adamw):
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    ElasticTrainer(main).fit()
