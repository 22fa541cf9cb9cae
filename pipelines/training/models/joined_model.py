"""Several models that a script trains in one loop, such as those of a GAN, as one module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

from torch import nn


class JoinedModel(nn.Module):
    """The models "0", "1" and so on; only these are called, never the whole."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, model in enumerate(models):
            self.add_module(str(number), model)

    def __iter__(self) -> Iterator[nn.Module]:
        """The models in their order, so that `a, b = models` works."""
        return self.children()

    def __getitem__(self, number: int) -> nn.Module:
        return list(self.children())[number]

    def __len__(self) -> int:
        return len(list(self.children()))

    def forward(self) -> NoReturn:
        raise TypeError("several models: call each, as in `generator, discriminator = models`")


def joined(models: Sequence[nn.Module]) -> nn.Module:
    """The models as one module; a single one as it is."""
    return models[0] if len(models) == 1 else JoinedModel(models)


def prefix_of(number: int, num_models: int) -> str:
    """What the names of the tensors of one of some models begin with in `joined`."""
    return f"{number}." if num_models > 1 else ""


def name_of_shared(module: nn.Module) -> str | None:
    """The name of a parameter that several of the called modules have, if there is any."""
    seen: set[nn.Parameter] = set()
    for root in roots_of(module):
        for name, parameter in root.named_parameters():
            if parameter in seen:
                return name
        seen.update(root.parameters())
    return None


def roots_of(module: nn.Module) -> list[nn.Module]:
    """The modules that are called: the joined models, or the module itself."""
    return list(module.children()) if isinstance(module, JoinedModel) else [module]
