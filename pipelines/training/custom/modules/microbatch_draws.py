"""Random draws that do not depend on how microbatches are merged into passes, and blocks into
stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from actors.distributed.torch_private import is_recomputed
from elastic.geometry.sample_order import keyed_seed
from pipelines.reading.pass_reader import seed_host
from pipelines.training.workload.drawing import (
    DROPOUTS,
    FILLS,
    OF_ELEMENTS,
    DropoutCall,
    draws,
    first_tensor,
)
from pipelines.training.workload.seeds import default_generator, forward_seed, seed_device


class PassSeeds(NamedTuple):
    """The seeds of a pass' microbatches, and where it computes.

    `draws` is the context of its forward, if it holds several microbatches that draw.
    """

    seeds: tuple[int, ...]
    device: torch.device
    draws: MicrobatchDraws | None = None


class MicrobatchDraws(TorchFunctionMode):
    """Calls a function that draws once for each microbatch of a pass: with the microbatch's slice
    of dim 0, and with the generator of a pass that has this microbatch alone.

    So the draws are exactly those of single microbatches, on any device. A draw that cannot be
    divided comes from the default generator, whose state shows it: one in place, one for a tensor
    whose dim 0 the microbatches do not divide, one that backward repeats, or one within another
    function, as `torch.nn.MultiheadAttention` uses.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        """`seeds` are those of the pass' microbatches, which have equal sizes."""
        super().__init__()
        self.has_divided = False
        self._generator = default_generator(device)
        seed_of = (lambda seed: seed) if device.type == "cuda" else forward_seed
        self._generators: list[torch.Generator] = []
        self.seed([seed_of(seed) for seed in seeds])

    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the generator of each microbatch."""
        device = self._generator.device
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is None:
            kwargs.pop("generator", None)  # not every function that makes a tensor takes it
            chosen = _plain_dropout(args, kwargs) if function in DROPOUTS else None
            if chosen is not None and self._has_equal_parts(chosen.input):
                return self._drop(chosen)
            if function in OF_ELEMENTS and self._divides(function, args, kwargs):
                return self._call_for_each(function, args, kwargs)
            if function in FILLS and self._has_equal_parts(args[0]):
                self._fill(function, args, kwargs)
                return args[0]
            if function is torch.rand or function is torch.randn:
                return self._make(function, args, kwargs)
        return function(*args, **kwargs)

    def _divides(self, function: Any, args: Any, kwargs: Any) -> bool:
        if kwargs.get("inplace") or not draws(function, args, kwargs):
            return False
        return self._has_equal_parts(first_tensor(args, kwargs))

    def _has_equal_parts(self, tensor: Tensor) -> bool:
        is_divided = tensor.dim() > 0 and tensor.shape[0] % len(self._generators) == 0
        return is_divided and not is_recomputed()

    def _call_for_each(self, function: Any, args: Any, kwargs: Any) -> Any:
        first = first_tensor(args, kwargs)
        part_size = first.shape[0] // len(self._generators)

        def parts_of(value: Any) -> Sequence[Any]:
            is_divided = (
                isinstance(value, Tensor)
                and value.dim() == first.dim()
                and value.shape[0] == first.shape[0]
            )
            return value.split(part_size) if is_divided else [value] * len(self._generators)

        parts = [parts_of(value) for value in args]
        named = {name: parts_of(value) for name, value in kwargs.items()}
        return torch.cat(
            self._with_each_state(
                lambda i: function(
                    *(part[i] for part in parts), **{name: part[i] for name, part in named.items()}
                )
            )
        )

    def _drop(self, chosen: DropoutCall) -> Tensor:
        """As torch's dropout on the host computes, with one multiplication for all microbatches."""
        kept = 1.0 - chosen.p
        noise = torch.empty_like(chosen.input)
        self._fill(Tensor.bernoulli_, (noise, kept), {})
        noise.div_(kept)
        return chosen.input.mul_(noise) if chosen.inplace else chosen.input * noise

    def _fill(self, function: Any, args: Any, kwargs: Any) -> None:
        tensor, *others = args
        parts = tensor.chunk(len(self._generators))
        for part, generator in zip(parts, self._generators, strict=True):
            function(part, *others, generator=generator, **kwargs)
        self.has_divided = True

    def _make(self, function: Any, args: Any, kwargs: Any) -> Any:
        made = torch.empty(*args, **kwargs)
        if not self._has_equal_parts(made):
            return function(*args, **kwargs)
        self._fill(Tensor.uniform_ if function is torch.rand else Tensor.normal_, (made,), {})
        return made

    def _with_each_state(self, call: Callable[[int], Any]) -> list[Any]:
        """The results of a call for each microbatch, which draws as from its generator."""
        default, kept = self._generator, self._generator.get_state()
        self.has_divided = True
        results = []
        for i, generator in enumerate(self._generators):
            default.set_state(generator.get_state())
            results.append(call(i))
            generator.set_state(default.get_state())
        default.set_state(kept)
        return results


def _plain_dropout(args: Sequence[Any], kwargs: dict[str, Any]) -> DropoutCall | None:
    """A dropout that draws, of a contiguous tensor on the host; None for another."""
    chosen = DropoutCall(*args, **kwargs)
    is_plain = chosen.drops and chosen.p < 1.0
    tensor = chosen.input
    is_on_host = tensor.device.type == "cpu" and tensor.is_contiguous()
    return chosen if is_plain and is_on_host and tensor.is_floating_point() else None


class BlockSeeds:
    """Seeds the random generators at the beginning of each block of a pipeline and behind the last,
    by the microbatch and the number of the block.

    So draws are the same on whichever stage a block is, and without stages.
    """

    def __init__(self, blocks: Sequence[str]) -> None:
        """`blocks` are the names of the modules in forward order."""
        self._blocks = tuple(blocks)
        self._current: PassSeeds | None = None
        self._attached: WeakSet[nn.Module] = WeakSet()

    def attach(self, module: nn.Module) -> None:
        """Seed in each of the blocks that a module has, or that a stage has of it."""
        if module in self._attached:
            return
        self._attached.add(module)
        parts = dict(module.named_modules(remove_duplicate=False))
        for number, name in enumerate(self._blocks):
            if (part := parts.get(name)) is not None:
                part.register_forward_pre_hook(partial(self._before, number))
        if (last := parts.get(self._blocks[-1])) is not None:
            last.register_forward_hook(self._after_last)

    def begin_loss(self, current: PassSeeds | None) -> None:
        """Seed as at the beginning of a loss; None: nothing is seeded, as in evaluation."""
        self.begin_blocks(current)
        if current is not None:
            seed_device(current.device, current.seeds[0])
            seed_host(forward_seed(current.seeds[0]))

    def begin_blocks(self, current: PassSeeds | None) -> None:
        """The blocks that follow belong to this pass."""
        self._current = current

    def behind_blocks(self) -> None:
        """Seed for what a loss draws behind the last block."""
        self._seed(len(self._blocks))

    def _before(self, number: int, block: nn.Module, inputs: Any) -> None:
        self._seed(number)

    def _after_last(self, block: nn.Module, inputs: Any, output: Any) -> None:
        self.behind_blocks()

    def _seed(self, number: int) -> None:
        current = self._current
        if current is None:
            return
        seeds = [block_seed(seed, number) for seed in current.seeds]
        seed_device(current.device, seeds[0])
        seed_host(seeds[0])
        if current.draws is not None:
            current.draws.seed(seeds)


def block_seed(seed: int, number: int) -> int:
    """The seed at the beginning of a block, given that of the microbatch."""
    return keyed_seed("block", seed, number)
