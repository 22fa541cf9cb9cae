"""A trainer class with callbacks that keeps its best weights; see docs/from-lightning.md."""

import math
import pathlib

import torch
from pipelines.api import ElasticTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_STEPS = 48


def moons(num_samples, seed):
    """Two half circles with noise, and the number of each point's half circle."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_samples) % 2
    angle = math.pi * torch.rand(num_samples, generator=generator)
    points = torch.stack((angle.cos() + labels, angle.sin() * (1 - 2 * labels)), 1)
    return TensorDataset(points + 0.2 * torch.randn(num_samples, 2, generator=generator), labels)


class Callback:
    def on_fit_begin(self, trainer):
        pass

    def on_step_end(self, trainer):
        pass

    def on_fit_end(self, trainer):
        pass


class PrintLoss(Callback):
    def on_step_end(self, trainer):
        rate = trainer.scheduler.get_last_lr()[0]
        print(f"step {trainer.step}: loss {trainer.loss.item():.6f}, rate {rate:.6f}", flush=True)


class BestCheckpoint(Callback):
    """Keeps the weights with the lowest held-out loss in a file."""

    def __init__(self, file, every):
        self.file, self.every = pathlib.Path(file), every

    def on_step_end(self, trainer):
        if trainer.step % self.every:
            return
        loss = trainer.validate()
        best = torch.load(self.file)["loss"] if self.file.exists() else math.inf
        if loss < best:
            model = trainer.model.state_dict()
            torch.save({"loss": loss, "step": trainer.step, "model": model}, self.file)


class Trainer:
    def __init__(self, model, optimizer, scheduler, loader, held_out, callbacks):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.loader, self.held_out, self.callbacks = loader, held_out, callbacks
        self.criterion = nn.CrossEntropyLoss()

    def notify(self, hook):
        for callback in self.callbacks:
            getattr(callback, hook)(self)

    def validate(self):
        self.model.eval()
        points, labels = self.held_out.tensors
        with torch.no_grad():
            loss = self.criterion(self.model(points), labels)
        self.model.train()
        return loss.item()

    def fit(self, run, num_steps):
        prepared = run.prepare(self.model, self.optimizer, self.scheduler, self.loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self.notify("on_fit_begin")
        for step in run.steps(num_steps, 6, max_grad_norm=1.0, split_batches=True):
            with step:
                for points, labels in step.batches():
                    self.loss = self.criterion(self.model(points), labels)
                    self.optimizer.zero_grad()
                    step.backward(self.loss)
                self.optimizer.step()
                self.scheduler.step()
            if step.committed and step.is_first_worker:
                self.step = step.number
                self.notify("on_step_end")
        self.notify("on_fit_end")


def main(run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=NUM_STEPS + 1)
    loader = DataLoader(moons(480, seed=1), batch_size=48, shuffle=True)
    callbacks = [PrintLoss(), BestCheckpoint("best.pt", every=12)]
    trainer = Trainer(model, optimizer, scheduler, loader, moons(200, seed=2), callbacks)
    trainer.fit(run, NUM_STEPS)


if __name__ == "__main__":
    ElasticTrainer(main).fit()
