"""The parameters that a run begins with, read region by region from a folder of `transformers`."""

from __future__ import annotations

from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic.geometry.regions import Region
from elastic.geometry.tensor_specs import TensorSpec
from pipelines.data.transformers_library import library
from pipelines.hugging_face.adapters import base_name
from pipelines.hugging_face.building import build
from pipelines.hugging_face.configuration import CONFIG, read_config, settings_of
from pipelines.hugging_face.names import EMBEDDING, HEAD, TensorPlace, parameter_shapes, place_of
from pipelines.hugging_face.tensor_files import TensorFiles
from pipelines.settings import HuggingFaceSettings, TrainSettings, TransformerSettings
from pipelines.settings.errors import UserError
from pipelines.settings.overrides import differing_training_settings


class StoredModel:
    """A folder of safetensors for a model that `transformers` builds.

    Files that name tensors as the model does are read region by region. Others, as those of
    experts that lie one by one, are loaded whole by `transformers`, which knows how to join them:
    that takes memory for the whole model in each worker. Raises `UserError` if the files are of
    another model.
    """

    def __init__(self, folder: Path, settings: HuggingFaceSettings) -> None:
        self.folder = folder
        self.files = TensorFiles(folder)
        model = build(settings.config)
        first = {one: name for name, one in model.named_parameters()}
        self.names = {name: name for name in model.state_dict() if name in self.files.places}
        for name, one in model.named_parameters(remove_duplicate=False):
            if name in self.files.places:
                self.names.setdefault(first[one], name)
        wanted = dict(model.named_parameters())
        self.is_direct = all(name in self.names for name in wanted)
        if self.is_direct:
            self._refuse_other_shapes({name: tuple(one.shape) for name, one in wanted.items()})

    def has(self, spec: TensorSpec) -> bool:
        """Whether the folder, and not the seed, says what this tensor begins with."""
        if spec.kind == "optimizer":
            return False
        name = base_name(spec.name)
        return name in (self.names if self.is_direct else self._whole)

    def read(self, spec: TensorSpec, region: Region) -> Tensor:
        """A region of a tensor, on the host, in the dtype that we keep."""
        if self.is_direct:
            found = self.files.slice(self.names[base_name(spec.name)], region)
        else:
            ends = zip(region.offsets, region.shape, strict=True)
            found = self._whole[base_name(spec.name)][tuple(slice(a, a + n) for a, n in ends)]
        return found.to(getattr(torch, spec.dtype), copy=True).contiguous()

    @cached_property
    def _whole(self) -> dict[str, Tensor]:
        loader = library().AutoModelForCausalLM.from_pretrained
        try:
            model, told = loader(
                self.folder, dtype="auto", local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"init_from={self.folder}: {reason}") from None
        if told["missing_keys"]:
            raise UserError(f"init_from={self.folder}: holds no {min(told['missing_keys'])}")
        return model.state_dict()

    def _refuse_other_shapes(self, wanted: dict[str, tuple[int, ...]]) -> None:
        for name, shape in wanted.items():
            with self.files.opened(self.names[name]) as header:
                found = tuple(header.get_shape())
            if found != shape:
                raise UserError(
                    f"init_from={self.folder}: {name} is {found}, but by the model's config {shape}"
                )


DTYPES = ("F64", "F32", "BF16", "F16")

SLAB_ELEMENTS = 1 << 24
"""How much of an embedding is in hand at a time while its mean row is computed."""


def open_pretrained(settings: TrainSettings) -> Pretrained | StoredModel | None:
    """What `init_from` names, its headers checked against the settings; None if it names nothing.

    Raises `UserError`.
    """
    if settings.init_from is None:
        return None
    if isinstance(settings.model, HuggingFaceSettings):
        return StoredModel(Path(settings.init_from), settings.model)
    if not isinstance(settings.model, TransformerSettings):
        raise UserError("init_from: only a transformer can begin from a folder; leave it out")
    return Pretrained(Path(settings.init_from), settings.model)


class Pretrained:
    """A folder of safetensors whose parameters fit a model of ours.

    Opening it reads the headers and nothing else. Raises `UserError` if it is of another model.
    """

    def __init__(self, folder: Path, model: TransformerSettings) -> None:
        self.folder = folder
        config = read_config(folder)
        stored = settings_of(config, folder)
        self._refuse_differences(stored, model)
        self.vocab_size = stored.vocab_size
        self.is_tied = bool(config.get("tie_word_embeddings", False))
        self.files = TensorFiles(folder)
        self._mean_row = cache(self._compute_mean_row)
        self._refuse_other_shapes(stored)

    def has(self, spec: TensorSpec) -> bool:
        """Whether the folder, and not the seed, says what this tensor begins with."""
        return spec.kind == "parameter"

    def read(self, spec: TensorSpec, region: Region) -> Tensor:
        """A region of one of our parameters, on the host, in the dtype that we keep.

        Rows of embedding and head for tokens that the folder does not know are the mean of those
        for tokens that it knows: k more beside n add at most log(1 + k / n) to a loss (Hewitt,
        Initializing New Word Embeddings, 2021).
        """
        place = self._place(spec.name)
        value = torch.empty(region.shape, dtype=getattr(torch, spec.dtype))
        known = self._known(place, region)
        num_known = known.shape[0]
        if num_known < region.shape[0]:
            first, width = region.offsets[1], region.shape[1]
            value[num_known:] = self._mean_row(place.name)[first : first + width]
        if known.num_elements:
            value[:num_known] = self.files.slice(place.name, place.region(spec.shape, known))
        return value

    def _known(self, place: TensorPlace, region: Region) -> Region:
        """The region without rows for tokens that the folder does not know."""
        if place.name not in (EMBEDDING, HEAD):
            return region
        num_known = min(region.shape[0], max(0, self.vocab_size - region.offsets[0]))
        return Region(region.offsets, (num_known, region.shape[1]))

    def _place(self, name: str) -> TensorPlace:
        place = place_of(name)
        return TensorPlace(EMBEDDING) if self.is_tied and place.name == HEAD else place

    def _compute_mean_row(self, name: str) -> Tensor:
        """Float64, summed by numpy, whose order does not depend on threads: all ranks get the
        same bits."""
        with self.files.opened(name) as whole:
            num_rows, width = whole.get_shape()
            height = max(1, SLAB_ELEMENTS // width)
            sums = np.zeros(width)
            for first in range(0, num_rows, height):
                sums += whole[first : first + height].double().numpy().sum(0)
        return torch.from_numpy(sums / num_rows)

    def _refuse_differences(self, stored: TransformerSettings, model: TransformerSettings) -> None:
        """But for what a folder does not say, and for rows that we have more than it."""
        same: dict[str, Any] = {
            "vocab_size": max(stored.vocab_size, model.vocab_size),
            "dropout": model.dropout,
        }
        if stored.experts and model.experts:
            unsaid = {"balance_coefficient": model.experts.balance_coefficient}
            same |= {
                "hidden_dim": model.hidden_dim,
                "experts": stored.experts.model_copy(update=unsaid),
            }
        theirs = TrainSettings(model=stored.model_copy(update=same))
        differing = differing_training_settings(theirs, TrainSettings(model=model))
        if differing:
            raise UserError(
                f"init_from={self.folder}: is another model than the recipe's "
                f"({'; '.join(differing)}): --set what the folder has, or take "
                "`transformer_from(folder)` as the recipe's model"
            )

    def _refuse_other_shapes(self, stored: TransformerSettings) -> None:
        """`stored` has the folder's own vocabulary."""
        for name, shape in parameter_shapes(stored).items():
            place = self._place(name)
            if place.name not in self.files.places:
                raise UserError(f"init_from={self.folder}: holds no {place.name}")
            with self.files.opened(place.name) as header:
                found, dtype = tuple(header.get_shape()), header.get_dtype()
            if found != place.shape(shape):
                raise UserError(
                    f"init_from={self.folder}: {place.name} is {found}, but by its {CONFIG} "
                    f"{place.shape(shape)}"
                )
            if dtype not in DTYPES:
                raise UserError(
                    f"init_from={self.folder}: {place.name} is {dtype}; only {', '.join(DTYPES)} "
                    "are read: save the model without quantisation"
                )
