"""Digits, cropped and flipped at random by reader processes; see docs/from-torchrun.md."""

import os

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

NUM_EPOCHS, NUM_TRAINED = 2, 1440
AUGMENTS = os.environ.get("AUGMENT", "1") == "1"


class Digits(Dataset):
    """Images of 8 x 8 pixels; those to train on are cropped and flipped at random."""

    def __init__(self, is_trained):
        images, labels = map(torch.tensor, load_digits(return_X_y=True))
        part = slice(None, NUM_TRAINED) if is_trained else slice(NUM_TRAINED, None)
        self.images, self.labels = images[part].float().view(-1, 1, 8, 8) / 16, labels[part]
        self.augments = is_trained and AUGMENTS

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augments:
            top, left = torch.randint(3, (2,)).tolist()
            image = pad(image, (1, 1, 1, 1))[:, top : top + 8, left : left + 8]
            if torch.rand(()) < 0.5:
                image = image.flip(2)
        return image, self.labels[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.GroupNorm(4, 32), nn.ReLU())
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images):
        return self.head(self.second(self.first(images)).flatten(1))


def losses(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def accuracy(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def main():
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    digits, held_out = Digits(is_trained=True), Digits(is_trained=False)
    sampler = DistributedSampler(digits)
    loader = DataLoader(digits, batch_size=24, sampler=sampler, num_workers=2)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    for epoch in range(NUM_EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            logits = model(images)
            loss = cross_entropy(logits, labels)
            right = (logits.argmax(1) == labels).float().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"loss {loss.item():.6f}, accuracy {right.item():.6f}", flush=True)
        for metric in (losses, accuracy):
            with torch.no_grad():
                print(f"held-out {metric.__name__} {metric(model.module, held_out[:]):.6f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
