"""A classifier of points into ten clusters; see docs/from-accelerate.md."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_EPOCHS = 3


def clusters(num_samples):
    """Points around ten centres, and the number of each point's centre."""
    centres = 2 * torch.randn(10, 32, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(num_samples) % 10
    noise = torch.randn(num_samples, 32, generator=torch.Generator().manual_seed(2))
    return TensorDataset(centres[labels] + noise, labels)


def main():
    accelerator = Accelerator(gradient_accumulation_steps=8)
    torch.manual_seed(42)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=36)
    loader = DataLoader(clusters(768), batch_size=8, shuffle=True, drop_last=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for epoch in range(NUM_EPOCHS):
        for points, labels in loader:
            with accelerator.accumulate(model):
                loss = criterion(model(points), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
