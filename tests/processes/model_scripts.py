"""Scripts that train several models in one loop, and their plain loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from loops import NUM_STEPS, die_once
from script_habits import note_values
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.utils.data import DataLoader, TensorDataset, default_collate

from elastic.geometry.sample_order import microbatch_seed, sample_of
from pipelines.loop import Run
from pipelines.training.workload.seeds import forward_seed

NUM_MICROBATCHES, MICROBATCH, NOISE = 4, 3, 5
UPDATES = 2
HELD_OUT = TensorDataset(torch.linspace(-1, 1, 24).view(6, 4).double())


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(NOISE, NOISE) for _ in range(2))
        self.head = nn.Linear(NOISE, 4)

    def forward(self, noise: Tensor) -> Tensor:
        for block in self.blocks:
            noise = noise + torch.tanh(block(noise))
        return self.head(noise)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.Linear(6, 6))
        self.body[2].requires_grad_(False)  # no optimizer has it
        self.score = nn.Linear(6, 1)

    def forward(self, points: Tensor) -> Tensor:
        return self.score(torch.tanh(self.body(points))).squeeze(-1)


def build(num_readers: int = 0) -> tuple[nn.Module, nn.Module, DataLoader[Any]]:
    torch.manual_seed(5)
    generator, critic = Generator().double(), Critic().double()
    data = TensorDataset(torch.randn(40, 4).double() + 1)
    loader = DataLoader(data, batch_size=MICROBATCH, shuffle=True, num_workers=num_readers)
    return generator, critic, loader


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def critic_loss(generator: nn.Module, critic: nn.Module, real: Tensor) -> Tensor:
    fake = generator(torch.randn(len(real), NOISE, dtype=real.dtype))
    good, bad = critic(real), critic(fake.detach())
    return nn.functional.softplus(-good).mean() + nn.functional.softplus(bad).mean()


def generator_loss(generator: nn.Module, critic: nn.Module, real: Tensor) -> Tensor:
    fake = generator(torch.randn(len(real), NOISE, dtype=real.dtype))
    return nn.functional.softplus(-critic(fake)).mean()


LOSSES = (critic_loss, generator_loss)


def gan(run: Run, num_readers: int = 0) -> None:
    """Two updates of each batch: the critic's, then the generator's."""
    generator, critic, loader = build(num_readers)
    generator_optimizer = Adam(generator.parameters(), lr=0.02, betas=(0.5, 0.9))
    critic_optimizer = Adam(trained(critic), lr=0.01)
    generator, critic, generator_optimizer, critic_optimizer, loader = run.prepare(
        generator, critic, generator_optimizer, critic_optimizer, loader
    )
    for step in run.steps(NUM_STEPS, NUM_MICROBATCHES, updates_per_batch=UPDATES):
        with step:
            for number, [real] in enumerate(step.batches()):
                if step.number in (8, 15) and number == 0:
                    die_once(step, f"step {step.number}")
                step.backward(LOSSES[step.update](generator, critic, real))
                real.zero_()  # the batch of the next update has its values again
            (critic_optimizer, generator_optimizer)[step.update].step()
        if step.committed and step.number % 6 == 0 and step.is_first_worker:
            values = {**prefixed("g", generator), **prefixed("c", critic)}
            note_values(step.number, "both", values)


def gan_with_readers(run: Run) -> None:
    gan(run, num_readers=2)


def plain_gan() -> Iterator[tuple[float, dict[str, Tensor]]]:
    """The loss of each step, and the values after it."""
    generator, critic, loader = build()
    generator_optimizer = Adam(generator.parameters(), lr=0.02, betas=(0.5, 0.9))
    critic_optimizer = Adam(trained(critic), lr=0.01)
    for step in range(1, NUM_STEPS + 1):
        update = (step - 1) % UPDATES
        optimizer = (critic_optimizer, generator_optimizer)[update]
        loss = plain_step(
            loader, step, (step - 1) // UPDATES,
            [generator_optimizer, critic_optimizer], optimizer,
            lambda real, update=update: LOSSES[update](generator, critic, real),
        )  # fmt: skip
        yield loss, {**prefixed("g", generator), **prefixed("c", critic)}


def prepared(run: Run) -> tuple[nn.Module, nn.Module, Any]:
    """Both models with one optimizer."""
    generator, critic, loader = build()
    optimizer = Adam([*generator.parameters(), *trained(critic)], lr=0.01)
    generator, critic, optimizer, _ = run.prepare(generator, critic, optimizer, loader)
    return generator, critic, optimizer


def one_loss(run: Run) -> None:
    """Both models have one loss and one optimizer; a frozen teacher is not prepared."""
    generator, critic, _ = prepared(run)
    teacher = Critic().double().requires_grad_(False).eval()
    run.evaluation(HELD_OUT, held_out_loss)
    for step in run.steps(NUM_STEPS, NUM_MICROBATCHES):
        with step:
            for number, [real] in enumerate(step.batches()):
                if step.number in (8, 15) and number == 0:
                    die_once(step, f"step {step.number}")
                step.backward(joint_loss(generator, critic, teacher, real))
        if step.committed and step.number % 6 == 0:
            loss = torch.tensor(run.evaluate()["loss"])
            if step.is_first_worker:
                note_values(step.number, "held", {"loss": loss})


def joint_loss(generator: nn.Module, critic: nn.Module, teacher: nn.Module, real: Tensor) -> Tensor:
    fake = generator(torch.randn(len(real), NOISE, dtype=real.dtype))
    return ((critic(fake) - teacher(fake)) ** 2).mean() + ((critic(real) - 1) ** 2).mean()


def held_out_loss(models: Any, batch: Any) -> Tensor:
    generator, critic = models
    [points] = batch
    noise = torch.cat([points, points[:, :1]], dim=1)
    return (critic(generator(noise)) ** 2).mean()


def plain_one_loss() -> Iterator[tuple[float, float]]:
    """The loss of each step, and the held-out loss after it."""
    generator, critic, loader = build()
    teacher = Critic().double().requires_grad_(False).eval()
    optimizer = Adam([*generator.parameters(), *trained(critic)], lr=0.01)
    for step in range(1, NUM_STEPS + 1):
        loss = plain_step(
            loader, step, step - 1, [optimizer], optimizer,
            lambda real: joint_loss(generator, critic, teacher, real),
        )  # fmt: skip
        critic.eval()
        with torch.no_grad():
            held_out = float(held_out_loss((generator, critic), HELD_OUT[:]))
        critic.train()
        yield loss, held_out


def plain_step(
    loader: DataLoader[Any],
    step: int,
    batch: int,
    optimizers: list[Optimizer],
    stepped: Optimizer,
    loss_of: Callable[[Tensor], Tensor],
) -> float:
    """One step of a plain loop on a batch of the run's order, with the run's seeds."""
    data, total = loader.dataset, 0.0
    for optimizer in optimizers:
        optimizer.zero_grad()
    for microbatch in range(NUM_MICROBATCHES):
        first = (batch * NUM_MICROBATCHES + microbatch) * MICROBATCH
        ids = range(first, first + MICROBATCH)
        [real] = default_collate([data[sample_of(0, i, len(data))] for i in ids])
        torch.manual_seed(forward_seed(microbatch_seed(0, step, microbatch)))
        loss = loss_of(real) / NUM_MICROBATCHES
        loss.backward()
        total += loss.item()
    stepped.step()
    return total


def prefixed(prefix: str, model: nn.Module) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": value.clone() for name, value in model.state_dict().items()}


def calls_after_its_optimizer(run: Run) -> None:
    """A script that would use parameters which the run has not updated yet."""
    generator, critic, optimizer = prepared(run)
    for step in run.steps(NUM_STEPS, NUM_MICROBATCHES):
        with step:
            for [real] in step.batches():
                step.backward(critic_loss(generator, critic, real))
            optimizer.step()
            critic(real)


def reads_twice(run: Run) -> None:
    generator, critic, _ = prepared(run)
    for step in run.steps(NUM_STEPS, NUM_MICROBATCHES):
        with step:
            for loss in LOSSES:
                for [real] in step.batches():
                    step.backward(loss(generator, critic, real))


def steps_by_worker(run: Run) -> None:
    """A script whose workers step different optimizers."""
    generator, critic, loader = build()
    optimizers = Adam(generator.parameters()), Adam(trained(critic))
    generator, critic, *optimizers, loader = run.prepare(generator, critic, *optimizers, loader)
    for step in run.steps(NUM_STEPS, NUM_MICROBATCHES):
        with step:
            for [real] in step.batches():
                step.backward(critic_loss(generator, critic, real))
            optimizers[step.is_first_worker].step()


def steps_outside(run: Run) -> None:
    generator, critic, loader = build()
    optimizers = Adam(generator.parameters()), Adam(trained(critic))
    generator, critic, *optimizers, loader = run.prepare(generator, critic, *optimizers, loader)
    for step in run.steps(NUM_STEPS, NUM_MICROBATCHES):
        with step:
            for [real] in step.batches():
                step.backward(critic_loss(generator, critic, real))
        optimizers[1].step()


class Headed(nn.Module):
    """Several of these share their body."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(6, width).double()

    def forward(self, points: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(points)))


def build_sharing() -> tuple[nn.Module, nn.Module, Optimizer, DataLoader[Any]]:
    *_, loader = build()
    body = nn.Linear(4, 6).double()
    actor, critic = Headed(body, 3), Headed(body, 1)
    parameters = dict.fromkeys([*actor.parameters(), *critic.parameters()])
    return actor, critic, Adam(parameters, lr=0.01), loader


def sharing_loss(actor: nn.Module, critic: nn.Module, real: Tensor) -> Tensor:
    return actor(real).square().mean() + (critic(real) - 1).square().mean()


def sharing(run: Run) -> None:
    """Actor and critic with a common body."""
    actor, critic, optimizer, loader = build_sharing()
    actor, critic, optimizer, loader = run.prepare(actor, critic, optimizer, loader)
    for step in run.steps(NUM_STEPS, NUM_MICROBATCHES):
        with step:
            for number, [real] in enumerate(step.batches()):
                if step.number in (8, 15) and number == 0:
                    die_once(step, f"step {step.number}")
                step.backward(sharing_loss(actor, critic, real))


def plain_sharing() -> Iterator[float]:
    actor, critic, optimizer, loader = build_sharing()
    for step in range(1, NUM_STEPS + 1):
        yield plain_step(
            loader, step, step - 1, [optimizer], optimizer,
            lambda real: sharing_loss(actor, critic, real),
        )  # fmt: skip
