"""A custom recipe, and the plain loop that trains it in one process."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from elastic.geometry.sample_order import sample_of
from pipelines.run.recipes import with_custom_model
from pipelines.settings import TrainSettings
from pipelines.settings.recipe import Recipe
from pipelines.training.workload.seeds import forward_seed

NUM_SAMPLES, NUM_EVALUATED = 50, 7
FACTORS = (0.25, 0.5, 1.0)
MAX_NORM = 0.5
SETTINGS = TrainSettings(
    batch=10,
    microbatch=2,
    steps=24,
    dtype="float64",
    seed=3,
    eval_every=12,
    eval_samples=NUM_EVALUATED,
)


class Images:
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(2, 5, 5, generator=generator)
        return {"image": image, "label": torch.tensor(index % 3), "noise": torch.rand(())}


class Net(nn.Module):
    """A net with BatchNorm, dropout, tied and frozen parameters, and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((2, 5), (5, 6), (6, 6))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.Dropout(0.1))
            for i, o in sizes
        )
        self.up, self.down, self.twin = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(8, 6)
        self.twin.weight = self.down.weight
        self.head = nn.Linear(6, 3)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 3), persistent=False)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            image = layer(image).relu()
        features = image.mean((2, 3))
        wide = self.up(features)
        features = features + self.down(wide.relu()) + self.twin(wide)
        return self.head(features) * self.scale + self.frozen


def loss(model, batch):
    return cross_entropy(model(batch["image"]), batch["label"])


def accuracy(model, batch):
    return (model(batch["image"]).argmax(1) == batch["label"]).double().mean()


def optimizer(named):
    named = list(named)
    return torch.optim.SGD(
        [
            {
                "params": [item for item in named if item[0].endswith("weight")],
                "weight_decay": 0.01,
            },
            {"params": [item for item in named if item[0].endswith("bias")], "lr": 0.3},
        ],
        lr=0.2,
        momentum=0.9,
    )


def schedule(step: int) -> float:
    return FACTORS[step % 3]


def recipe() -> Recipe:
    return Recipe(
        Net,
        loss,
        optimizer,
        Images,
        SETTINGS,
        schedule=schedule,
        max_grad_norm=MAX_NORM,
        held_out=Images,
        metrics={"accuracy": accuracy},
        plan={"up": "colwise", "down": "rowwise", "twin": "rowwise"},
    )


CUSTOM_SETTINGS = with_custom_model(recipe()).settings


def train_in_one_process(
    seed_of,
) -> tuple[list[float], dict[int, list[float]], dict[str, torch.Tensor]]:
    """Return the loss of each step, loss and accuracy of each evaluation, and the final state.

    `seed_of` returns the seed of a microbatch, which determines its noise and dropout.
    """
    torch.manual_seed(SETTINGS.seed)
    net, data = Net().double(), Images()
    trained = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    sgd = optimizer(trained)
    base_lrs = [group["lr"] for group in sgd.param_groups]
    size, num = SETTINGS.microbatch, SETTINGS.num_microbatches
    changing_buffers = {name: buffer for name, buffer in net.named_buffers() if name != "scale"}
    losses, evaluations = [], {}
    for step in range(1, SETTINGS.steps + 1):
        buffers_before = {name: buffer.clone() for name, buffer in changing_buffers.items()}
        buffers_after, total_loss = [], 0.0
        for number in range(num):
            for name, buffer in changing_buffers.items():
                buffer.copy_(buffers_before[name])
            first = (step - 1) * SETTINGS.batch + number * size
            ids = [sample_of(SETTINGS.seed, first + i, NUM_SAMPLES) for i in range(size)]
            torch.manual_seed(seed_of(SETTINGS.seed, step, number))
            batch = [data[index] for index in ids]
            torch.manual_seed(forward_seed(seed_of(SETTINGS.seed, step, number)))
            microbatch_loss = mean_loss(net, batch) / num
            buffers_after.append(
                {name: buffer.clone() for name, buffer in changing_buffers.items()}
            )
            microbatch_loss.backward()
            total_loss += microbatch_loss.item()
        for name, buffer in changing_buffers.items():
            buffer.copy_(torch.stack([buffers[name].double() for buffers in buffers_after]).mean(0))
        torch.nn.utils.clip_grad_norm_([p for _, p in trained], MAX_NORM)
        for group, lr in zip(sgd.param_groups, base_lrs, strict=True):
            group["lr"] = lr * schedule(step)
        sgd.step()
        sgd.zero_grad()
        losses.append(total_loss)
        if step % SETTINGS.eval_every == 0:
            net.eval()
            with torch.no_grad():
                held_out = [data[index] for index in range(NUM_EVALUATED)]
                is_right = [
                    net(sample["image"][None].double()).argmax() == sample["label"]
                    for sample in held_out
                ]
                evaluations[step] = [
                    mean_loss(net, held_out).item(),
                    sum(is_right).item() / len(is_right),
                ]
            net.train()
    state = net.state_dict()
    del state["twin.weight"]
    return losses, evaluations, state


def mean_loss(net, batch):
    images = torch.stack([sample["image"] for sample in batch]).double()
    return cross_entropy(net(images), torch.stack([sample["label"] for sample in batch]))
