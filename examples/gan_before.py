"""A GAN that learns a ring of points, with averaged weights; see docs/imperative.md."""

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset

NUM_BATCHES, NOISE = 18, 4


class Ring(IterableDataset):
    """Points of a ring, each with the noise of one that is generated."""

    def __iter__(self):
        random = torch.Generator().manual_seed(0)
        while True:
            angle = torch.rand((), generator=random) * 2 * torch.pi
            yield torch.stack([angle.cos(), angle.sin()]), torch.randn(NOISE, generator=random)


def network(num_inputs, num_outputs):
    return nn.Sequential(
        nn.Linear(num_inputs, 32),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, num_outputs),
    )


def main():
    torch.manual_seed(1)
    generator, critic = network(NOISE, 2), network(2, 1)
    averaged = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.5, 0.99))
    loader = iter(DataLoader(Ring(), batch_size=24))

    for number in range(NUM_BATCHES):
        points, noise = next(loader)

        critic_optimizer.zero_grad()
        fakes = generator(noise).detach()
        loss = (softplus(-critic(points)) + softplus(critic(fakes))).mean()
        loss.backward()
        critic_optimizer.step()
        print(f"{number}: critic {loss.item():.5f}")

        generator_optimizer.zero_grad()
        loss = softplus(-critic(generator(noise))).mean()
        loss.backward()
        generator_optimizer.step()
        print(f"{number}: generator {loss.item():.5f}")

        averaged.update_parameters(generator)

    torch.save(averaged.module.state_dict(), "generator.pt")


if __name__ == "__main__":
    main()
