"""A classifier of points into ten clusters; see docs/from-accelerate.md."""

import torch
from pipelines.api import ElasticTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_EPOCHS = 3


def clusters(num_samples):
    """Points around ten centres, and the number of each point's centre."""
    centres = 2 * torch.randn(10, 32, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(num_samples) % 10
    noise = torch.randn(num_samples, 32, generator=torch.Generator().manual_seed(2))
    return TensorDataset(centres[labels] + noise, labels)


def main(run):
    torch.manual_seed(42)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=36)
    loader = DataLoader(clusters(768), batch_size=8, shuffle=True, drop_last=True)
    model, optimizer, loader, scheduler = run.prepare(model, optimizer, loader, scheduler)

    for epoch, steps in run.epochs(NUM_EPOCHS, microbatches=8):
        for step in steps:
            with step:
                for points, labels in step.batches():
                    loss = criterion(model(points), labels)
                    step.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        run.print(f"epoch {epoch}: loss {step.loss:.3f}")


if __name__ == "__main__":
    ElasticTrainer(main).fit()
