"""The workload of a custom recipe: the user's module, data, loss and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from elastic.geometry.model_limits import Limits
from elastic.geometry.regions import Region
from elastic.geometry.sample_order import keyed_seed
from pipelines.errors import UserError
from pipelines.reading.batch_reads import BatchReads
from pipelines.reading.endless import Endless
from pipelines.reading.indexed import map_style, open_indexed
from pipelines.reading.pass_reader import (
    PassReader,
    Request,
    num_samples_of,
    request_of,
    seed_host,
)
from pipelines.reading.readers import Readers
from pipelines.reading.stream import Stream
from pipelines.settings import MlpSettings
from pipelines.settings.recipe import Dataset, Losses, Recipe
from pipelines.training.attention.cut_sequences import own_part
from pipelines.training.custom.custom_optimizer import CustomOptimizerFactory
from pipelines.training.custom.custom_shape import shape_of
from pipelines.training.custom.merge_trial import (
    Merging,
    draws_at_random,
    try_merging,
)
from pipelines.training.custom.module_calls import BodyTrial
from pipelines.training.custom.modules.block_flow import flow_of
from pipelines.training.custom.modules.custom_module import (
    MAX_WHOLE_BYTES,
    InitialValues,
    build_shapes,
    find_blocks,
    seeded,
)
from pipelines.training.custom.modules.custom_pipeline import (
    Chain,
    CustomBatch,
    inputs_of,
    parts_of,
)
from pipelines.training.custom.modules.loss_sums import counted
from pipelines.training.custom.modules.microbatch_draws import (
    BlockSeeds,
    MicrobatchDraws,
    PassSeeds,
)
from pipelines.training.custom.optimizer_checks import uncut_parameters, why_not_split
from pipelines.training.custom.refused_axes import refused_axes
from pipelines.training.models.expert_parallel import distribute_experts
from pipelines.training.models.mlp import MlpWorkload
from pipelines.training.passes.stage_modules import SharedParameters
from pipelines.training.workload.optimizer import OptimizerFactory
from pipelines.training.workload.parallel_groups import ALONE, ParallelGroups
from pipelines.training.workload.seeds import forward_seed
from pipelines.training.workload.state import trained_dims
from pipelines.training.workload.trees import mapped, tensors_in
from pipelines.training.workload.workload import (
    CustomLoss,
    LossSums,
    Metric,
    ModelShape,
    SeededSamples,
    nothing,
)

NUM_DIGESTED = 3


class CustomWorkload:
    """The workload of a recipe; see `pipelines.training.workload.workload.Workload`.

    A rank with fewer microbatches than others repeats one with a gradient of 0, because a custom
    module may not accept an empty batch.
    """

    seq_len = 1
    is_far = False
    has_constant_size = True

    def __init__(
        self, recipe: Recipe, most_bytes: float = MAX_WHOLE_BYTES, positions: str | None = None
    ) -> None:
        """A module with more than `most_bytes` of parameters is drawn by region. `positions` is the
        folder or URL for the positions of a stream. Raises `UserError` for data without samples."""
        self.settings = recipe.settings
        self.dtype: torch.dtype = getattr(torch, recipe.settings.dtype)
        self.optimizer_factory: OptimizerFactory = CustomOptimizerFactory(recipe, self.module)
        self.body: BodyTrial | None = None
        self._positions = positions
        self.take_data(recipe)
        self.values = InitialValues(recipe.model, recipe.settings.seed, most_bytes)
        self.is_miniature = False
        self._readers: Readers | None = None
        self._batch_reads = BatchReads(self.settings)

    def take_data(self, recipe: Recipe) -> None:
        """Use the data, and the functions of data, of this recipe, which is otherwise the same: its
        script has been restarted. Reader processes keep those with which they began."""
        self.recipe = recipe
        self._open_train = partial(open_indexed, recipe.data, self.settings, self._positions)
        self.train = self._open_train()
        self.held_out = map_style(recipe.held_out(), "held_out") if recipe.held_out else None
        self.num_samples = len(self.train)
        self.num_held_out = len(self.held_out) if self.held_out is not None else 0
        if not self.num_samples and not isinstance(self.train, Stream | Endless):
            raise UserError("the recipe's data have no sample: their len() is 0")
        self.metrics: dict[str, Metric] = {
            name: partial(counted, metric) for name, metric in sorted(recipe.metrics.items())
        }
        self._reader = PassReader(lambda: self.train, recipe.collate)
        self._latest: dict[bool, CustomBatch] = {}
        """The latest microbatch of each split: False is training, True is held-out."""

    @cached_property
    def _shape(self) -> ModelShape:
        recipe, module = self.recipe, self.module()
        parts = recipe.pipeline, self._names_of_blocks, bool(recipe.sequence), recipe.experts
        shape = shape_of(module, recipe.plan, recipe.tp_divides, *parts)
        return replace(shape, make_stage=self._make_stage)

    @cached_property
    def _names_of_blocks(self) -> list[str]:
        module = self.module()
        names = {part: name for name, part in module.named_modules()}
        return [names[block] for block in find_blocks(module, self.recipe.blocks)]

    @cached_property
    def flow(self) -> tuple[Tensor, ...]:
        """The input of each block of the pipeline for a microbatch, and the last output, as meta
        tensors."""
        inputs = inputs_of(self.recipe.loss, self.example(self.settings.microbatch).value)
        return flow_of(self.recipe, self._shape.layers, inputs)

    @cached_property
    def digest(self) -> str:
        """A digest of the numbers of samples, and of a few samples."""
        length = self.train.length if isinstance(self.train, Endless) else self.num_samples
        digest = sha256(f"{length} {self.num_held_out}".encode())
        for number in range(NUM_DIGESTED if length else 1):
            sample = number * max(0, length - 1) // (NUM_DIGESTED - 1)
            seed_host(keyed_seed("digest", sample))
            batch = self.recipe.collate([self.train[sample]])
            for tensor in tensors_in(batch):
                value = tensor.detach().cpu().contiguous()
                digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
                digest.update(value.view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def module(self, parallel: ParallelGroups = ALONE) -> nn.Module:
        module = build_shapes(self.recipe.model, self.settings.seed, self.values.most_bytes)
        if parallel is not ALONE:
            distribute_experts(module, self._shape, parallel)
        return module

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """The blocks of the whole module that this stage has."""
        modules = dict(module.named_modules(remove_duplicate=False))
        held = (modules[name] for name in self._names_of_blocks if name in modules)
        return [block for block in held if not isinstance(block, SharedParameters)]

    def shape(self) -> ModelShape:
        return self._shape

    def limits(self) -> Limits:
        """The limits of the shape, and what trials of the module and of the optimizer refuse."""
        refused = refused_axes(self, self._shape, self._why_not_split)
        return replace(self._shape.limits, refused=refused)

    @cached_property
    def whole_parameters(self) -> Collection[str]:
        return uncut_parameters(self.optimizer_factory, trained_dims(self.module()))

    @cached_property
    def _why_not_split(self) -> str | None:
        return why_not_split(self.optimizer_factory, trained_dims(self.module()))

    @cached_property
    def merging(self) -> Merging:
        return try_merging(self)

    @property
    def why_unmergeable(self) -> str | None:
        return self.merging.why_not

    @property
    def divides_draws(self) -> bool:
        return self.merging.divides_draws

    @property
    def custom_loss(self) -> CustomLoss:
        return self

    def release(self) -> None:
        if not self.is_miniature:
            self.values.release()

    def draw(
        self,
        name: str,
        shape: tuple[int, ...],
        region: Region,
        seed: int,
        interrupt: Callable[[], None] = nothing,
    ) -> Tensor:
        """A region of the constructor's value under the run's seed; see `InitialValues`."""
        return self.values.draw(name, shape, region, interrupt)

    def reach(self) -> None:
        """Nothing to do: the constructor has opened the datasets."""

    def start_readers(self) -> None:
        """Start the reader processes that the settings ask for."""
        recipe, settings = self.recipe, self.settings.reading
        if settings.num_readers and self._readers is None:
            reader = PassReader(self._open_train, recipe.collate, recipe.begin_reader)
            if isinstance(self.train, Stream):  # each reader would iterate over all of it
                settings = settings.model_copy(update={"num_readers": 1})
            self._readers = Readers(reader, settings)

    def read_ahead(self, passes: Iterable[Sequence[SeededSamples]]) -> None:
        if self._readers is not None:
            self._readers.follow(map(request_of, passes))

    def prefetch(self, samples: Sequence[int], held_out: bool = False) -> None:
        """Nothing to do: a map-style dataset has no prefetch."""

    def read(
        self,
        samples: Sequence[int],
        held_out: bool = False,
        interrupt: Callable[[], None] = nothing,
    ) -> CustomBatch:
        """Read a microbatch; its random augmentation is seeded by the step and the microbatch."""
        seed = torch.initial_seed()
        if held_out:
            seed = keyed_seed("held out", self.settings.seed, samples[0])
        seed_host(seed)
        self._latest[held_out] = batch = self.collated(samples, held_out)
        return batch

    def read_pass(
        self, parts: Sequence[SeededSamples], interrupt: Callable[[], None] = nothing
    ) -> CustomBatch:
        """Read the microbatches of a pass; the random augmentation of each has its own seed."""
        request = request_of(parts)
        value = self._batch_reads.read(request, partial(self._read, interrupt=interrupt))
        num_samples = num_samples_of(request)
        self._latest[False] = batch = CustomBatch(value, num_samples, num_samples)
        return batch

    def _read(self, request: Request, interrupt: Callable[[], None]) -> Any:
        if self._readers is None:
            return self._reader.read(request, lambda sample: interrupt())
        return self._readers.take(request, interrupt)

    def seed_forward(self, seed: int) -> None:
        """Reading may have drawn from the host's generators, here or in another process."""
        seed_host(forward_seed(seed))

    @property
    def has_readers(self) -> bool:
        return self._readers is not None

    def empty(self, num_samples: int = 0, held_out: bool = False) -> CustomBatch:
        """A padding microbatch: the split's latest one, so it is as finite as real data."""
        if held_out not in self._latest:
            self.read(self.first(self.settings.microbatch, held_out), held_out)
        return self._latest[held_out]._replace(num_samples=0)

    def first(self, num_samples: int, held_out: bool = False) -> list[int]:
        """The ids of the first `num_samples` samples, repeated cyclically if there are fewer."""
        available = self.num_held_out if held_out else self.num_samples
        return [number % available if available else number for number in range(num_samples)]

    def collated(self, samples: Sequence[int], held_out: bool = False) -> CustomBatch:
        """The batch of these samples, without seeding the generators."""
        return self.batch_of(self.items(samples, held_out))

    def items(self, samples: Sequence[int], held_out: bool = False) -> list[Any]:
        """What the dataset returns for each of these samples."""
        data = self._dataset(held_out)
        return [data[sample] for sample in samples]

    def batch_of(self, items: list[Any]) -> CustomBatch:
        """The batch that the recipe's `collate` makes of these items."""
        return CustomBatch(self.recipe.collate(items), len(items), len(items))

    def example(self, num_samples: int, held_out: bool = False) -> CustomBatch:
        """The first samples on the host; the generators' states are restored afterwards."""
        with seeded(self.settings.seed):
            batch = self.collated(self.first(num_samples, held_out), held_out)
        return self.feed(batch, torch.device("cpu"), ALONE, 0)

    def feed(
        self, batch: CustomBatch, device: torch.device, parallel: ParallelGroups, *seeds: int
    ) -> CustomBatch:
        """The batch on the device, with floating-point tensors in the run's dtype."""

        def fed(tensor: Tensor) -> Tensor:
            dtype = self.dtype if tensor.is_floating_point() else None
            if device.type != "cuda":
                return tensor.to(device, dtype)
            if self.settings.reading.pin_memory and tensor.device.type == "cpu":
                tensor = tensor.pin_memory()
            return tensor.to(device, dtype, non_blocking=True)

        is_divided = len(seeds) > 1 and self.divides_draws
        draws = MicrobatchDraws(seeds, device) if is_divided else None
        known = PassSeeds(seeds, device, draws) if seeds else None
        batch = batch._replace(value=mapped(fed, batch.value), seeds=known)
        if not self.recipe.sequence or parallel.num_cp == 1:
            return batch
        value, length = own_part(batch.value, self.recipe.sequence, parallel)
        return batch._replace(value=value, length=length)

    def losses(self, module: nn.Module, fed: CustomBatch, parallel: ParallelGroups) -> LossSums:
        self.release()
        if self.block_seeds is not None:
            self.block_seeds.attach(module)
        self.begin_blocks(fed, module.training)
        with (fed.seeds and fed.seeds.draws) or nullcontext():
            return counted(self.loss_in(module.training), module, fed, parallel)

    @cached_property
    def block_seeds(self) -> BlockSeeds | None:
        """The seeds of the blocks, if the recipe has a pipeline and draws."""
        if not self.recipe.pipeline or not draws_at_random(self):
            return None
        return BlockSeeds(parts_of(self.module(), self.recipe.pipeline))

    def begin_loss(self, fed: CustomBatch, training: bool) -> None:
        if self.block_seeds is not None:
            self.block_seeds.begin_loss(fed.seeds if training else None)

    def begin_blocks(self, fed: CustomBatch, training: bool) -> None:
        if self.block_seeds is not None:
            self.block_seeds.begin_blocks(fed.seeds if training else None)

    def behind_blocks(self) -> None:
        if self.block_seeds is not None:
            self.block_seeds.behind_blocks()

    def loss_in(self, training: bool) -> Callable[[nn.Module, Any], Losses]:
        """The recipe's loss for training or for evaluation."""
        return self.recipe.loss if training else self.recipe.evaluation or self.recipe.loss

    def kinds(self, training: bool) -> Sequence[Metric]:
        """The functions computed on a microbatch: the loss and, in evaluation, the metrics."""
        loss = partial(counted, self.loss_in(training))
        return [loss, *(() if training else self.metrics.values())]

    def num_tokens(self, targets: Tensor) -> Tensor:
        raise NotImplementedError("a recipe's loss is not split")

    def loss(self, output: Tensor, targets: Tensor, parallel: ParallelGroups) -> Tensor:
        raise NotImplementedError("a recipe's loss is not split")

    def flowing(self, layer: int, num_samples: int, parallel: ParallelGroups) -> Tensor:
        return self.flow[layer] if self.recipe.pipeline else torch.empty(0, device="meta")

    def miniature(self) -> CustomWorkload | MlpWorkload:
        """The workload itself, as a custom module cannot be made smaller.

        A module too large for one worker is replaced by a small MLP.
        """
        if self.values.is_large:
            return MlpWorkload(MlpSettings(dims=(8, 8, 8)), self.settings.seed, self.dtype)
        miniature = copy(self)
        miniature.is_miniature = True
        miniature._readers = None
        return miniature

    def _make_stage(self, module: nn.Module, kept: range) -> None:
        parts = [name for number in kept for name in self._shape.layers[number].modules]
        blocks = [module.get_submodule(name) for name in parts]
        if self.block_seeds is not None:
            self.block_seeds.attach(module)
        module.forward = Chain(blocks, self.flow[kept.stop])

    def _dataset(self, held_out: bool) -> Dataset:
        if held_out and self.held_out is None:
            raise UserError("eval_every: the recipe has no `held_out` data; give some, or set 0")
        return self.held_out if held_out and self.held_out is not None else self.train
