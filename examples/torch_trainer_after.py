"""A classifier of waves by their frequency; see docs/from-accelerate.md."""

import ray.train
import torch
from pipelines.api import ElasticTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_EPOCHS = 3


def waves(num_samples):
    """Noisy waves of one of eight frequencies, and the number of each wave's frequency."""
    labels = torch.arange(num_samples) % 8
    clean = torch.sin(torch.linspace(0, 6.28, 64) * (1 + labels[:, None]))
    noise = torch.randn(num_samples, 64, generator=torch.Generator().manual_seed(1))
    return TensorDataset((clean + noise)[:, None], labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(1, 16, 5, stride=2), nn.BatchNorm1d(16), nn.ReLU())
        self.second = nn.Sequential(nn.Conv1d(16, 32, 5, stride=2), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, 8)

    def forward(self, waves):
        return self.head(self.second(self.first(waves)).mean(2))


def train_func(run):
    torch.manual_seed(0)
    model = run.prepare(Net())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(waves(768), batch_size=64, shuffle=True)
    loader, optimizer = run.prepare(loader, optimizer)

    for epoch in run.range(NUM_EPOCHS):
        for inputs, labels in loader:
            loss = criterion(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        run.print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    trainer = ElasticTrainer(train_func, scaling_config=ray.train.ScalingConfig(num_workers=(1, 4)))
    print(trainer.fit().metrics)
