"""A GPT whose batches a function draws from a text; see docs/imperative.md."""

import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from pipelines.api import ElasticTrainer

NUM_STEPS, WARM_UP, EVAL_EVERY = 30, 5, 10
BATCH, ACCUMULATION, LENGTH = 4, 6, 32
WIDTH, NUM_HEADS, NUM_LAYERS = 32, 4, 2

text = "".join(f"{n % 97} + {n % 89} = {n % 97 + n % 89}\n" for n in range(3000))
data = torch.tensor(list(text.encode()))
splits = {"train": data[: len(data) * 9 // 10], "val": data[len(data) * 9 // 10 :]}


def get_batch(split):
    starts = torch.randint(len(splits[split]) - LENGTH, (BATCH,))
    windows = torch.stack([splits[split][start : start + LENGTH + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden):
        parts = self.qkv(self.norms[0](hidden)).unflatten(-1, (3, NUM_HEADS, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.norms[1](hidden))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 128, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, inputs, targets):
        hidden = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    losses = [model(*get_batch("val"))[1].item() for _ in range(4)]
    model.train()
    return sum(losses) / len(losses)


def rate(step):
    if step < WARM_UP:
        return 0.01 * (step + 1) / WARM_UP
    return 0.005 + 0.005 * math.cos(math.pi * (step - WARM_UP) / (NUM_STEPS - WARM_UP))


def main(run):
    torch.manual_seed(1337)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))
    model, optimizer = run.prepare(model, optimizer)
    run.draw(get_batch, "train")

    for step in run.steps(NUM_STEPS, ACCUMULATION, max_grad_norm=1.0):
        for group in optimizer.param_groups:
            group["lr"] = rate(step.number - 1)
        if step.number % EVAL_EVERY == 1:
            run.print(f"step {step.number}: val loss {estimate_loss(model):.4f}")
        with step:
            for inputs, targets in step.batches():
                _, loss = model(inputs, targets)
                step.backward(loss)

    torch.save(model.state_dict(), "gpt.pt")


if __name__ == "__main__":
    ElasticTrainer(main).fit()
