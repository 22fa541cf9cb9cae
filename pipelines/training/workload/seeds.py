"""Random generators keyed by their purpose."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Generator

from elastic.geometry.sample_order import keyed_seed


def keyed_generator(*key: str | int) -> Generator:
    """A host generator whose stream depends on the key alone, on any machine."""
    return Generator().manual_seed(keyed_seed(*key))


def forward_seed(seed: int) -> int:
    """The seed of a pass' forward on the host, given that of its (first) microbatch. It differs
    from the microbatch's, which its reading uses, perhaps in another process."""
    return keyed_seed("forward", seed)


def seed_device(device: torch.device, seed: int) -> None:
    """Seed torch's default generators of the host and of one device.

    `torch.manual_seed` seeds every kind of device, and formats a stack trace for each absent one:
    a hundredth of a short step.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def default_generator(device: torch.device) -> Generator:
    """The generator from which draws on a device come."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def generator_states(device: torch.device) -> list[Any]:
    """The states of the random generators of torch, Python and NumPy, to be compared."""
    numpy_state = [np.asarray(part).tolist() for part in np.random.get_state()]
    states = [torch.get_rng_state().tolist(), random.getstate(), numpy_state]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).tolist())
    return states
