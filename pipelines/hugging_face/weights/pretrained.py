"""Pretrained parameters for step 0, read region by region from a folder of `transformers`."""

from __future__ import annotations

from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic.geometry.regions import Region
from elastic.geometry.tensor_specs import TensorSpec
from pipelines.data.cache import local_folder
from pipelines.data.transformers_library import library
from pipelines.errors import UserError
from pipelines.hugging_face.adapters import base_name
from pipelines.hugging_face.building import build
from pipelines.hugging_face.configuration import CONFIG, read_config, settings_of
from pipelines.hugging_face.tensor_files import TensorFiles
from pipelines.hugging_face.weights.names import (
    EMBEDDING,
    HEAD,
    TensorPlace,
    parameter_shapes,
    place_of,
)
from pipelines.settings import HuggingFaceSettings, TrainSettings, TransformerSettings
from pipelines.settings.overrides import differing_training_settings

DTYPES = ("F64", "F32", "BF16", "F16")
SLAB_ELEMENTS = 1 << 24
"""Elements of an embedding in memory at a time while its mean row is computed."""


def open_pretrained(settings: TrainSettings) -> Pretrained | StoredModel | None:
    """The model that `init_from` names, its headers checked against the settings; or None.

    Raises `UserError`.
    """
    if settings.init_from is None:
        return None
    if isinstance(settings.model, HuggingFaceSettings):
        return StoredModel(local_folder(settings.init_from, settings.cache), settings.model)
    if not isinstance(settings.model, TransformerSettings):
        raise UserError(
            f"init_from: model.kind={settings.model.kind} cannot start from a folder; leave it out"
        )
    return Pretrained(local_folder(settings.init_from, settings.cache), settings.model)


class Pretrained:
    """A folder of safetensors for our transformer.

    Opening it reads only the headers. Raises `UserError` if the folder has another model.
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
        """Whether the folder, and not the seed, has the initial value of this tensor."""
        return spec.kind == "parameter"

    def read(self, spec: TensorSpec, region: Region) -> Tensor:
        """A region of one of our parameters, on the host, in the dtype that the run stores.

        Rows of embedding and head for tokens that the folder lacks are the mean of its rows. So k
        tokens beside n known ones add at most log(1 + k / n) to a loss (Hewitt, Initializing New
        Word Embeddings, 2021).
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
        """The region without rows for tokens that the folder lacks."""
        if place.name not in (EMBEDDING, HEAD):
            return region
        num_known = min(region.shape[0], max(0, self.vocab_size - region.offsets[0]))
        return Region(region.offsets, (num_known, region.shape[1]))

    def _place(self, name: str) -> TensorPlace:
        place = place_of(name)
        return TensorPlace(EMBEDDING) if self.is_tied and place.name == HEAD else place

    def _compute_mean_row(self, name: str) -> Tensor:
        """The mean row of a tensor in float64.

        NumPy sums it in an order that does not depend on threads, so all ranks get the same bits.
        """
        with self.files.opened(name) as whole:
            num_rows, width = whole.get_shape()
            height = max(1, SLAB_ELEMENTS // width)
            sums = np.zeros(width)
            for first in range(0, num_rows, height):
                sums += whole[first : first + height].double().numpy().sum(0)
        return torch.from_numpy(sums / num_rows)

    def _refuse_differences(self, stored: TransformerSettings, model: TransformerSettings) -> None:
        """Raise `UserError` if the folder's model is not the recipe's.

        Settings that a folder does not store are ignored, and the recipe may have a larger
        vocabulary.
        """
        ignored: dict[str, Any] = {
            "vocab_size": max(stored.vocab_size, model.vocab_size),
            "dropout": model.dropout,
        }
        if stored.experts and model.experts:
            not_stored = {"balance_coefficient": model.experts.balance_coefficient}
            ignored |= {
                "hidden_dim": model.hidden_dim,
                "experts": stored.experts.model_copy(update=not_stored),
            }
        expected = TrainSettings(model=stored.model_copy(update=ignored))
        differing = differing_training_settings(expected, TrainSettings(model=model))
        if differing:
            raise UserError(
                f"init_from={self.folder}: is another model than the recipe's "
                f"({'; '.join(differing)}): --set the folder's values, or use "
                "`transformer_from(folder)` as the recipe's model"
            )

    def _refuse_other_shapes(self, stored: TransformerSettings) -> None:
        """Raise `UserError` if the files do not have the tensors of the folder's config."""
        for name, shape in parameter_shapes(stored).items():
            place = self._place(name)
            if place.name not in self.files.places:
                raise UserError(f"init_from={self.folder}: has no tensor {place.name}")
            with self.files.opened(place.name) as header:
                actual, dtype = tuple(header.get_shape()), header.get_dtype()
            if actual != place.shape(shape):
                raise UserError(
                    f"init_from={self.folder}: {place.name} has shape {actual}, but its {CONFIG} "
                    f"says {place.shape(shape)}"
                )
            if dtype not in DTYPES:
                raise UserError(
                    f"init_from={self.folder}: {place.name} is {dtype}; only {', '.join(DTYPES)} "
                    "are supported: save the model without quantization"
                )


class StoredModel:
    """A folder of safetensors for a model that `transformers` builds.

    If the files have the model's tensor names, they are read region by region. Otherwise, e.g. for
    experts stored one by one, `transformers` loads and joins them, which takes memory for the whole
    model in each worker. Raises `UserError` if the files belong to another model.
    """

    def __init__(self, folder: Path, settings: HuggingFaceSettings) -> None:
        self.folder = folder
        self.files = TensorFiles(folder)
        model = build(settings.config)
        first_names = {parameter: name for name, parameter in model.named_parameters()}
        self.names = {name: name for name in model.state_dict() if name in self.files.places}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in self.files.places:
                self.names.setdefault(first_names[parameter], name)
        shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
        self.is_direct = all(name in self.names for name in shapes)
        if self.is_direct:
            self._refuse_other_shapes(shapes)

    def has(self, spec: TensorSpec) -> bool:
        """Whether the folder, and not the seed, has the initial value of this tensor."""
        if spec.kind == "optimizer":
            return False
        name = base_name(spec.name)
        return name in (self.names if self.is_direct else self._whole)

    def read(self, spec: TensorSpec, region: Region) -> Tensor:
        """A region of a tensor, on the host, in the dtype that the run stores."""
        if self.is_direct:
            value = self.files.slice(self.names[base_name(spec.name)], region)
        else:
            ends = zip(region.offsets, region.shape, strict=True)
            value = self._whole[base_name(spec.name)][tuple(slice(a, a + n) for a, n in ends)]
        return value.to(getattr(torch, spec.dtype), copy=True).contiguous()

    @cached_property
    def _whole(self) -> dict[str, Tensor]:
        loader = library().AutoModelForCausalLM.from_pretrained
        try:
            model, report = loader(
                self.folder, dtype="auto", local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"init_from={self.folder}: {reason}") from None
        if report["missing_keys"]:
            missing = min(report["missing_keys"])
            raise UserError(f"init_from={self.folder}: has no tensor {missing}")
        tensors: dict[str, Tensor] = model.state_dict()
        return tensors

    def _refuse_other_shapes(self, shapes: dict[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            with self.files.opened(self.names[name]) as header:
                actual = tuple(header.get_shape())
            if actual != shape:
                raise UserError(
                    f"init_from={self.folder}: {name} has shape {actual}, but the model's config "
                    f"says {shape}"
                )
