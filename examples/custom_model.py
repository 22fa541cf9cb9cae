"""A custom convolutional net: elastic train examples/custom_model.py:recipe --workers 2"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from pipelines.settings import TrainSettings
from pipelines.settings.recipe import Recipe

NUM_CLASSES = 4


class Stripes(Dataset):
    """Noisy images of stripes at one of four angles, generated on access."""

    def __init__(self, num_samples, first=0):
        self.num_samples, self.first = num_samples, first

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + index)
        label = index % NUM_CLASSES
        angle = torch.tensor(torch.pi * label / NUM_CLASSES)
        stripes = (torch.arange(16) * angle.cos() + torch.arange(16)[:, None] * angle.sin()).sin()
        return (stripes + torch.randn(16, 16, generator=generator))[None], label


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, stride=2, padding=1), nn.BatchNorm2d(o), nn.ReLU())
            for i, o in ((1, width), (width, 2 * width), (2 * width, 4 * width))
        )
        self.head = nn.Linear(4 * width, NUM_CLASSES)

    def forward(self, images):
        for layer in self.layers:
            images = layer(images)
        return self.head(images.mean((2, 3)))


def loss(model, batch):
    images, labels = batch
    return cross_entropy(model(images), labels, label_smoothing=0.1)


def recipe():
    return Recipe(
        model=Net,
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, weight_decay=1e-4),
        schedule=lambda step: min(1.0, step / 10),
        data=lambda: Stripes(2048),
        held_out=lambda: Stripes(256, first=2048),
        settings=TrainSettings(batch=48, microbatch=8, steps=60, eval_every=20, eval_samples=256),
    )
