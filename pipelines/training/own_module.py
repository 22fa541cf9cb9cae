"""A module that initialises itself: its shapes, its values at step 0, its blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from pipelines.errors import UserError
from pipelines.overrides import near


class InitialValues:
    """What a module's constructor makes of its parameters and buffers under a seed.

    They are kept, on the host, until `release`; asked for again, they are made again.
    """

    def __init__(self, model: Callable[[], nn.Module], seed: int) -> None:
        self.model = model
        self.seed = seed
        self._values: dict[str, Tensor] | None = None

    def get(self) -> dict[str, Tensor]:
        if self._values is None:
            self._values = build_for_real(self.model, self.seed).state_dict()
        return self._values

    def release(self) -> None:
        self._values = None


def build_for_real(model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The module on the host, every generator seeded; they go on afterwards as before."""
    with torch.device("cpu"), seeded(seed):
        return _checked(model())


def shapes_alone(model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The module with its parameters and buffers on the meta device, but for what no state has:
    buffers that are not persistent, and tensors that are neither, keep their values."""
    try:
        with torch.device("meta"), seeded(seed):
            module = _checked(model())
        if not _keeps_values_apart(module):
            return module
    except (RuntimeError, NotImplementedError):
        pass  # a constructor that reads values can only be run for real
    module = build_for_real(model, seed)
    persistent = module.state_dict().keys()
    made: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, part in module.named_modules():
        for key, parameter in list(part.named_parameters(recurse=False)):
            empty = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            setattr(part, key, made.setdefault(parameter, empty))
        for key, buffer in list(part.named_buffers(recurse=False)):
            if f"{prefix}.{key}".removeprefix(".") in persistent:
                setattr(part, key, buffer.to("meta"))
    return module


def find_blocks(
    module: nn.Module, wanted: Sequence[str | type[nn.Module]] | None = None
) -> list[nn.Module]:
    """The modules of these names or classes, or else the children of lists (`nn.ModuleList`,
    `nn.Sequential`) of several modules of one class; none inside of another. In forward order, as
    far as a module names its children in that order.

    Raises `UserError` for a name or class that the module has not.
    """
    found: list[nn.Module] = []
    for part in _wanted(module, wanted) if wanted is not None else _repeated(module):
        if not any(part is inner for block in found for inner in block.modules()):
            found.append(part)
    return found


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The host's generators seeded within, and as before afterwards."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def _checked(module: object) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise UserError(f"the recipe's model returned {type(module).__name__}, not an nn.Module")
    return module


def _keeps_values_apart(module: nn.Module) -> bool:
    persistent = module.state_dict().keys()
    if any(name not in persistent for name, _ in module.named_buffers(remove_duplicate=False)):
        return True
    return any(isinstance(v, Tensor) for part in module.modules() for v in vars(part).values())


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    for part in module.modules():
        children = list(part.children())
        alike = len({type(child) for child in children}) == 1 and len(children) > 1
        if isinstance(part, nn.ModuleList | nn.Sequential) and alike:
            yield from (child for child in children if any(True for _ in child.parameters()))


def _wanted(module: nn.Module, wanted: Sequence[str | type[nn.Module]]) -> Iterator[nn.Module]:
    named = dict(module.named_modules())
    classes = tuple(one for one in wanted if isinstance(one, type))
    names = [one for one in wanted if isinstance(one, str)]
    for name in names:
        if name not in named:
            raise UserError(f"blocks: the module has no {name}; {near(name, list(named))}")
    for one in classes:
        if not any(isinstance(part, one) for part in named.values()):
            raise UserError(f"blocks: the module has no part of class {one.__name__}")
    for name, part in named.items():
        if name in names or isinstance(part, classes):
            yield part
