"""Custom modules that initialise themselves: their shapes, values at step 0, and blocks."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from actors.distributed.torch_private import has_gradient_hook
from elastic.geometry.regions import Region
from pipelines.errors import UserError
from pipelines.settings.overrides import similar_names
from pipelines.training.workload.initial_values import draw, slices_of
from pipelines.training.workload.recorded_init import RecordedFill, Recorder

HOOKED = (
    "has a hook on its gradient, which the run would not call: change the loss instead, or freeze "
    "what is not trained"
)
MAX_WHOLE_BYTES = 4 << 30
"""Up to this size of parameters each worker builds the whole module, as a plain script would. Of a
larger module it draws only its own regions."""


class InitialValues:
    """The values that a module's constructor gives its parameters and buffers under a seed.

    Up to `most_bytes` of parameters they equal those of the constructor. In a larger module each
    tensor is drawn by region from the distribution that the constructor uses. If that is unknown,
    the constructor's whole tensor is used. The values stay in host memory until `release`; a later
    request builds them again.
    """

    def __init__(
        self, model: Callable[[], nn.Module], seed: int, most_bytes: float = MAX_WHOLE_BYTES
    ) -> None:
        self.model = model
        self.seed = seed
        self.most_bytes = most_bytes
        self._values: dict[str, Tensor | RecordedFill] | None = None
        self._names: dict[int, str] = {}
        """The name of the first tensor of each draw, whose values its copies share."""

    @cached_property
    def is_large(self) -> bool:
        shapes = build_shapes(self.model, self.seed, self.most_bytes)
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

    def _get(self) -> dict[str, Tensor | RecordedFill]:
        if self._values is None:
            self._values = self._build()
        return self._values

    def _build(self) -> dict[str, Tensor | RecordedFill]:
        if not self.is_large:
            return {**build_on_host(self.model, self.seed).state_dict()}
        recorder = Recorder(self.seed)
        state = _build_recorded(self.model, self.seed, recorder).state_dict()
        # A second pass is needed: the first may allocate a tensor after it has recorded its copy.
        for _ in range(2):
            values = {name: recorder.record(value) or value for name, value in state.items()}
        for name, value in values.items():
            if isinstance(value, RecordedFill):
                self._names.setdefault(value.draw, name)
        whole = [name for name, value in state.items() if values[name] is value]
        num_bytes = sum(state[name].nbytes for name in whole)
        if num_bytes > self.most_bytes / 16:
            largest = max(whole, key=lambda name: state[name].nbytes)
            warnings.warn(_WHOLE.format(num_bytes / 1e9, largest), stacklevel=2)
        return values


_WHOLE = (
    "each worker holds {:.1f} GB of whole initial values until its first step, the largest for {}: "
    "only parameters filled by normal_, uniform_, trunc_normal_, zeros_ or ones_ can be drawn in "
    "part. Use these for large parameters, and do not change them partly in the constructor"
)


def parameter_bytes(module: nn.Module) -> int:
    """The bytes of a module's parameters, on any device."""
    return sum(parameter.nbytes for parameter in module.parameters())


def count_parameters(module: nn.Module) -> int:
    """The number of a module's parameters, on any device."""
    return sum(parameter.numel() for parameter in module.parameters())


def build_on_host(model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The module on the host, built with seeded generators, whose state is restored afterwards."""
    with torch.device("cpu"), seeded(seed):
        return _checked(model())


def _build_recorded(model: Callable[[], nn.Module], seed: int, recorder: Recorder) -> nn.Module:
    """The module on the host, without allocating its large tensors."""
    with torch.device("cpu"), seeded(seed), recorder:
        return _checked(model())


def build_shapes(
    model: Callable[[], nn.Module], seed: int, most_bytes: float = MAX_WHOLE_BYTES
) -> nn.Module:
    """The module with its state on the meta device.

    Tensors outside of the state, i.e. non-persistent buffers and plain tensor attributes, keep
    their values. To get these, a module of more than `most_bytes` is not built whole.
    """
    try:
        with torch.device("meta"), seeded(seed):
            module = _checked(model())
        if not _has_stateless_tensors(module):
            return module
    except (RuntimeError, NotImplementedError):
        pass  # a constructor that reads values fails on the meta device
    recorder = Recorder(seed)
    module = _build_recorded(model, seed, recorder)
    if parameter_bytes(module) <= most_bytes:
        module = build_on_host(model, seed)
    for _, tensor in _stateless_tensors(module):
        recorder.make_real(tensor)
    persistent = module.state_dict().keys()
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, part in module.named_modules():
        for key, parameter in list(part.named_parameters(recurse=False)):
            empty = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            vars(empty).update(vars(parameter))
            setattr(part, key, replaced.setdefault(parameter, empty))
        for key, buffer in list(part.named_buffers(recurse=False)):
            if f"{prefix}.{key}".removeprefix(".") in persistent:
                setattr(part, key, buffer.to("meta"))
    return module


def find_blocks(
    module: nn.Module, wanted: Sequence[str | type[nn.Module]] | None = None
) -> list[nn.Module]:
    """The modules of these names or classes; by default the children of each list (`nn.ModuleList`,
    `nn.Sequential`) of several modules of one class.

    No block is inside another. They are in forward order if the module defines its children in that
    order. Raises `UserError` for a name or class that the module does not have.
    """
    blocks: list[nn.Module] = []
    for part in _named(module, wanted) if wanted is not None else _repeated(module):
        if not any(part is inner for block in blocks for inner in block.modules()):
            blocks.append(part)
    return blocks


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the host's random generators within the block, and restore them afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _checked(module: object) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise UserError(f"the recipe's model returned {type(module).__name__}, not an nn.Module")
    for name, parameter in module.named_parameters():
        if has_gradient_hook(parameter):
            raise UserError(f"the recipe's model: {name} {HOOKED}")
    return module


def _has_stateless_tensors(module: nn.Module) -> bool:
    return any(True for _ in _stateless_tensors(module))


def _stateless_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module that are not part of its state."""
    persistent = module.state_dict().keys()
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name not in persistent:
            yield name, buffer
    for part in module.modules():
        yield from ((key, value) for key, value in vars(part).items() if isinstance(value, Tensor))


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    for part in module.modules():
        children = list(part.children())
        is_repeated = len({type(child) for child in children}) == 1 and len(children) > 1
        if isinstance(part, nn.ModuleList | nn.Sequential) and is_repeated:
            yield from (child for child in children if any(True for _ in child.parameters()))


def _named(module: nn.Module, wanted: Sequence[str | type[nn.Module]]) -> Iterator[nn.Module]:
    named = dict(module.named_modules())
    classes = tuple(kind for kind in wanted if isinstance(kind, type))
    names = [name for name in wanted if isinstance(name, str)]
    for name in names:
        if name not in named:
            raise UserError(f"blocks: the module has no {name}; {similar_names(name, list(named))}")
    for kind in classes:
        if not any(isinstance(part, kind) for part in named.values()):
            raise UserError(f"blocks: the module has no part of class {kind.__name__}")
    for name, part in named.items():
        if name in names or isinstance(part, classes):
            yield part
