"""What a script trains on: its loader, or a function that draws batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from inspect import isgeneratorfunction
from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from pipelines.loop.state.errors import LoopMisused
from pipelines.reading.endless import (
    DrawnBatches,
    Endless,
    InSequence,
    ShuffledInPart,
    WithReplacement,
    YieldedBatches,
)
from pipelines.reading.sampler_order import InSamplerOrder
from pipelines.reading.stream import is_stream
from pipelines.reading.stream_positions import digest_of
from pipelines.settings import ReadingSettings
from pipelines.settings.recipe import Dataset
from pipelines.settings.user_code import describe
from pipelines.training.custom.modules.custom_module import seeded

SAMPLERS = {RandomSampler.__module__, DistributedSampler.__module__}
"""The modules of torch's own samplers."""
NUM_COMPARED = 64
"""So many of the first indices of other samplers are compared."""


@dataclass(frozen=True)
class DataSource:
    """Samples, how those of a microbatch become a batch, and how they are read."""

    dataset: Dataset
    collate: Callable[[list[Any]], Any]
    microbatch: int
    epoch_size: int = 0
    """The number of samples of an epoch; 0: not known."""
    reading: ReadingSettings = field(default_factory=ReadingSettings)
    begin_reader: Callable[[int], None] | None = None
    """The loader's `worker_init_fn`."""
    first_length: int = 0
    """`length` before the loop."""
    drops_last: bool = False
    """Whether an epoch consists of whole steps."""
    num_omitted: int = 0
    """The samples that each epoch therefore omits, though the loader does not say so."""

    @property
    def length(self) -> int:
        """The number of samples now; 0: not known, or the order does not depend on it."""
        match self.dataset:
            case WithReplacement():
                return 0
            case Endless():
                return self.dataset.length
        return 0 if is_stream(self.dataset) else len(self.dataset)

    def split(self, microbatches: int) -> DataSource:
        """The source whose microbatches are parts of what is one here. Raises `LoopMisused` if it
        cannot be divided."""
        if self.microbatch % microbatches:
            raise LoopMisused(
                f"run.steps: split_batches: the loader's batch_size={self.microbatch} is no "
                f"multiple of microbatches={microbatches}: pass a number of microbatches that "
                "divides it"
            )
        return replace(self, microbatch=self.microbatch // microbatches)

    def of_steps(self, batch: int) -> DataSource:
        """The source for steps of `batch` samples: without the last ones of each epoch that do not
        fill a step, if the loader has `drop_last`. Raises `LoopMisused` if none fills one."""
        size = self.epoch_size - self.epoch_size % batch
        if not self.drops_last or size == self.epoch_size:
            return self
        if not size:
            raise LoopMisused(
                f"run.steps: an epoch of {self.epoch_size} samples has no step of {batch}, and the "
                "loader has drop_last=True: use a smaller batch_size, or fewer microbatches"
            )
        dataset: Dataset = self.dataset
        match dataset:
            case InSequence():
                dataset = InSequence(dataset.dataset, size)
            case InSamplerOrder():
                dataset = InSamplerOrder(dataset.dataset, dataset.sampler, size)
            case WithReplacement():
                """Each sample is drawn for itself."""
            case _:
                dataset = ShuffledInPart(dataset, size)
        return replace(self, dataset=dataset, epoch_size=size)

    def in_whole_steps(self, batch: int) -> DataSource:
        """The source for a loop over epochs. Raises `LoopMisused` if their length is not known."""
        if not self.epoch_size:
            raise LoopMisused("run.epochs: the data have no known length: pass it steps_per_epoch")
        num_omitted = 0 if self.drops_last else self.epoch_size % batch
        whole = replace(self, drops_last=True, num_omitted=num_omitted)
        return whole.of_steps(batch)

    def note_on_epochs(self, batch: int) -> str | None:
        """What a user may not expect of the last batch of an epoch, or None."""
        if self.num_omitted:
            return (
                f"{self.epoch_size + self.num_omitted} samples are not a multiple of the {batch} "
                f"of a step: each epoch omits {self.num_omitted}"
            )
        rest = self.epoch_size % batch
        if not rest or isinstance(self.dataset, WithReplacement):
            return None
        return (
            f"{self.epoch_size} samples are not a multiple of the {batch} of a step: the last "
            f"{rest} of an epoch are computed with the first ones of the next; a loader with "
            "drop_last=True drops them"
        )

    def refuse_other_length(self) -> None:
        """Raise `LoopMisused` if the dataset has more or fewer samples than before the loop."""
        if (length := self.length) != self.first_length:
            raise LoopMisused(
                f"the loader's dataset has {length} samples in place of {self.first_length}: the "
                "order of the samples is fixed before the loop: let it have all of them from the "
                "start, such as a buffer of its final size, or draw batches from it by run.draw"
            )


def source_of(loader: DataLoader[Any]) -> DataSource:
    """The samples of a loader, in its order. Raises `LoopMisused` for an order that other workers
    cannot know."""
    collate, size = loader.collate_fn, loader.batch_size
    if size is None:  # the items of the dataset, or of the batch sampler, are batches
        collate, size = _OfOne(loader.collate_fn), 1
    dataset, length = _ordered(loader)
    reading = _reading_of(loader)
    source = DataSource(dataset, collate, size, length, reading, loader.worker_init_fn)
    return replace(source, first_length=source.length, drops_last=loader.drop_last)


def drawn_by(function: Callable[..., Any], arguments: Sequence[Any]) -> DataSource:
    """Microbatches that a function draws, or yields. Raises `LoopMisused` if they are not the same
    when the random generators have the same seeds."""
    is_generator = isgeneratorfunction(function)
    drawn = (
        YieldedBatches(function, arguments) if is_generator else DrawnBatches(function, arguments)
    )
    digests = []
    for _ in range(2):
        with seeded(0):
            digests.append(digest_of(drawn.first()))
    if digests[0] != digests[1]:
        name = getattr(function, "__name__", type(function).__name__)
        verb = "yields" if is_generator else "returns"
        raise LoopMisused(
            f"run.draw: {name} {verb} other values when it is called again with the same random "
            "seeds, as it has a position or a generator of its own: pass run.draw a generator "
            "function that begins again each time"
        )
    if isinstance(drawn, YieldedBatches):
        return source_of(DataLoader(drawn, batch_size=None))
    return DataSource(drawn, _OfOne(), 1)


class _OfOne:
    """The `collate` of a microbatch of one item, which is a whole batch."""

    def __init__(self, convert: Callable[[Any], Any] | None = None) -> None:
        self._convert = convert

    def __call__(self, items: list[Any]) -> Any:
        [item] = items
        return item if self._convert is None else self._convert(item)


def _ordered(loader: DataLoader[Any]) -> tuple[Dataset, int]:
    """The loader's dataset, so that the run reads it in the loader's order; and the number of
    samples of an epoch, 0 if it is not known."""
    dataset: Dataset = loader.dataset  # type: ignore[assignment]
    if is_stream(dataset):
        return dataset, 0
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise LoopMisused(
            "run.prepare: the loader's dataset needs __len__ and __getitem__, so that any worker "
            "can read any sample, or __iter__, which begins again each time"
        )
    if not len(dataset):
        raise LoopMisused("run.prepare: the loader's dataset is empty")
    if loader.batch_size is None and loader.batch_sampler is not None:
        return _in_order_of(loader.batch_sampler, dataset)
    return _sampled(dataset, loader.sampler)


def _sampled(dataset: Dataset, sampler: Any) -> tuple[Dataset, int]:
    if type(sampler).__module__ not in SAMPLERS:  # a subclass may have another order
        return _in_order_of(sampler, dataset)
    match sampler:
        case RandomSampler() if sampler.replacement:
            return WithReplacement(dataset), sampler.num_samples
        case RandomSampler() if sampler.num_samples == len(dataset):
            return dataset, len(dataset)
        case SequentialSampler():
            return InSequence(dataset), len(dataset)
        case SubsetRandomSampler():
            part: Any = Subset(dataset, list(sampler.indices))  # type: ignore[arg-type]
            return part, len(part)
        case DistributedSampler():  # the run itself divides the samples among the workers
            return dataset if sampler.shuffle else InSequence(dataset), len(dataset)
        case WeightedRandomSampler() if sampler.replacement:
            return WithReplacement(dataset, sampler.weights.tolist()), sampler.num_samples
    return _in_order_of(sampler, dataset)


def _in_order_of(sampler: Any, dataset: Dataset) -> tuple[Dataset, int]:
    """The dataset in the order of any sampler. Raises `LoopMisused` for one whose order the other
    workers cannot know."""
    name = type(sampler).__name__
    within = (sampler, *getattr(sampler, "__dict__", {}).values())
    if any(getattr(part, "num_replicas", 1) != 1 for part in within):
        raise _other_order(name, "names the samples of one rank only")
    try:
        ordered = InSamplerOrder(dataset, sampler)
    except Exception as error:  # whatever its objects raise when they are copied
        raise _other_order(name, f"cannot be copied ({describe(error)})") from error
    if ordered.first(NUM_COMPARED) != ordered.first(NUM_COMPARED):
        raise _other_order(name, "has another order with the same random seeds")
    return ordered, len(sampler) if hasattr(type(sampler), "__len__") else 0


def _other_order(name: str, why: str) -> LoopMisused:
    return LoopMisused(
        f"run.prepare: the loader's {name} {why}, so that the other workers cannot know its order: "
        "make it depend on a seed and set_epoch, or set shuffle=True or False without a sampler"
    )


def _reading_of(loader: DataLoader[Any]) -> ReadingSettings:
    """The run's settings for the reader processes that a loader asks for."""
    changes: dict[str, Any] = {}
    if loader.prefetch_factor is not None:
        changes["prefetch_factor"] = loader.prefetch_factor
    if loader.timeout:
        changes["sample_timeout_s"] = loader.timeout
    return ReadingSettings(num_readers=loader.num_workers, pin_memory=loader.pin_memory, **changes)
