"""A module that initialises itself: its shapes, its values at step 0, its blocks."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from elastic.geometry.regions import Region
from pipelines.settings.errors import UserError
from pipelines.settings.overrides import near
from pipelines.training.workload.initial_values import draw, slices_of
from pipelines.training.workload.recorded_init import Record, Recorder

MAX_WHOLE_BYTES = 4 << 30
"""Of the parameters of a module that each worker builds as a plain script would; of a larger one it
draws only what it holds."""


class InitialValues:
    """What a module's constructor makes of its parameters and buffers under a seed.

    Up to `most_bytes` of parameters they are exactly what the constructor makes. Of a larger module
    a tensor is drawn by region, from the distribution that the constructor draws it from; where
    that is not known, the tensor is the constructor's. What has been built is kept, on the host,
    until `release`; asked for again, it is built again.
    """

    def __init__(
        self, model: Callable[[], nn.Module], seed: int, most_bytes: float = MAX_WHOLE_BYTES
    ) -> None:
        self.model = model
        self.seed = seed
        self.most_bytes = most_bytes
        self._values: dict[str, Tensor | Record] | None = None
        self._names: dict[int, str] = {}
        """Of the first tensor of each draw: copies have its values."""

    @cached_property
    def is_large(self) -> bool:
        shapes = shapes_alone(self.model, self.seed, self.most_bytes)
        return parameter_bytes(shapes) > self.most_bytes

    def draw(
        self, name: str, shape: tuple[int, ...], region: Region, interrupt: Callable[[], None]
    ) -> Tensor:
        """A region of a parameter or buffer, on the host."""
        value = self._get()[name]
        if isinstance(value, Tensor):
            return value[slices_of(region)].clone()
        assert value.distribution is not None
        key = self._names[value.draw]
        return draw(value.distribution, key, self.seed, shape, region, interrupt)

    def release(self) -> None:
        self._values = None

    def _get(self) -> dict[str, Tensor | Record]:
        if self._values is None:
            self._values = self._build()
        return self._values

    def _build(self) -> dict[str, Tensor | Record]:
        if not self.is_large:
            return {**build_for_real(self.model, self.seed).state_dict()}
        recorder = Recorder(self.seed)
        state = _build_recorded(self.model, self.seed, recorder).state_dict()
        # What the first pass makes real may have copies that it has met before.
        for _ in range(2):
            values = {name: recorder.record(value) or value for name, value in state.items()}
        for name, value in values.items():
            if isinstance(value, Record):
                self._names.setdefault(value.draw, name)
        whole = [name for name, value in state.items() if values[name] is value]
        num_bytes = sum(state[name].nbytes for name in whole)
        if num_bytes > self.most_bytes / 16:
            largest = max(whole, key=lambda name: state[name].nbytes)
            warnings.warn(_WHOLE.format(num_bytes / 1e9, largest), stacklevel=2)
        return values


_WHOLE = (
    "each worker holds {:.1f} GB of the module's initial values whole until its first step, the "
    "largest of them {}: it draws in part only what normal_, uniform_, trunc_normal_, zeros_ or "
    "ones_ fills. Use these for large parameters, and change no part of them in the constructor"
)


def parameter_bytes(module: nn.Module) -> int:
    """What the parameters of a module take, on whichever device."""
    return sum(parameter.nbytes for parameter in module.parameters())


def build_for_real(model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The module on the host, every generator seeded; they go on afterwards as before."""
    with torch.device("cpu"), seeded(seed):
        return _checked(model())


def _build_recorded(model: Callable[[], nn.Module], seed: int, recorder: Recorder) -> nn.Module:
    """The module on the host without memory for its large tensors."""
    with torch.device("cpu"), seeded(seed), recorder:
        return _checked(model())


def shapes_alone(
    model: Callable[[], nn.Module], seed: int, most_bytes: float = MAX_WHOLE_BYTES
) -> nn.Module:
    """The module with its parameters and buffers on the meta device, but for what no state has:
    buffers that are not persistent, and tensors that are neither, keep their values. To have these
    a module of more than `most_bytes` is not built whole."""
    try:
        with torch.device("meta"), seeded(seed):
            module = _checked(model())
        if not _keeps_values_apart(module):
            return module
    except (RuntimeError, NotImplementedError):
        pass  # a constructor that reads values can only be run for real
    recorder = Recorder(seed)
    module = _build_recorded(model, seed, recorder)
    if parameter_bytes(module) <= most_bytes:
        module = build_for_real(model, seed)
    for _, tensor in _apart(module):
        recorder.make_real(tensor)
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
    return any(True for _ in _apart(module))


def _apart(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module that are no part of its state."""
    persistent = module.state_dict().keys()
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name not in persistent:
            yield name, buffer
    for part in module.modules():
        yield from ((key, value) for key, value in vars(part).items() if isinstance(value, Tensor))


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
