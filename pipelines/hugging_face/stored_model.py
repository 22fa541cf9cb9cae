"""The weights that a model of `transformers` begins with, from a folder of its own."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from elastic.regions import Region
from elastic.specs import TensorSpec
from pipelines.errors import UserError
from pipelines.hugging_face.adapters import base_name
from pipelines.hugging_face.building import build
from pipelines.hugging_face.library import library
from pipelines.hugging_face.tensor_files import TensorFiles
from pipelines.settings import HuggingFaceSettings


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
