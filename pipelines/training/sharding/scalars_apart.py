"""Parameters without dims beside those that FSDP shards, such as a learned temperature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from types import MappingProxyType

from torch import Tensor

from actors.runtime.program import Interrupt
from pipelines.training.sharding.fully_sharded import FullySharded
from pipelines.training.sharding.sharded import Sharded
from pipelines.training.sharding.zero import ZeroSharded


class ScalarsApart:
    """Modules that FSDP shards, without the parameters that have no dims; see `Sharded`.

    Each rank has these whole. Their gradients are reduced after the last backward pass.
    """

    elsewhere: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    def __init__(self, parts: FullySharded, scalars: ZeroSharded) -> None:
        """`parts` and `scalars` share the modules."""
        self.modules = parts.modules
        self._scalars = scalars
        self._all: tuple[Sharded, ...] = (parts, scalars)

    def shards(self) -> dict[str, Tensor]:
        return {name: shard for some in self._all for name, shard in some.shards().items()}

    def num_copies(self) -> dict[str, int]:
        return {name: number for some in self._all for name, number in some.num_copies().items()}

    def adopt(self, shards: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        names = self._scalars.shards().keys()
        parts, scalars = self._all
        parts.adopt({name: shard for name, shard in shards.items() if name not in names}, buffers)
        scalars.adopt({name: shards[name] for name in names}, {})

    def gather(self, interrupt: Interrupt) -> None:
        for some in self._all:
            some.gather(interrupt)

    def accumulate(self, last: bool) -> None:
        for some in self._all:
            some.accumulate(last)

    def sum_gradients(self, number: int) -> None:
        for some in self._all:
            some.sum_gradients(number)

    def reduce(self, interrupt: Interrupt) -> None:
        for some in self._all:
            some.reduce(interrupt)

    def gradients(self) -> dict[str, Tensor]:
        return {name: value for some in self._all for name, value in some.gradients().items()}

    def drop_gradients(self, chosen: Callable[[str], bool] | None = None) -> None:
        for some in self._all:
            some.drop_gradients(chosen)

    def after_step(self) -> None:
        for some in self._all:
            some.after_step()

    def release(self) -> None:
        for some in self._all:
            some.release()

    def resident_tensors(self) -> Iterable[Tensor]:
        return chain.from_iterable(some.resident_tensors() for some in self._all)

    def gradient_bytes(self) -> int:
        return sum(some.gradient_bytes() for some in self._all)
