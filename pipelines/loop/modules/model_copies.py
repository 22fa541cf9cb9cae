"""A worker's copy of a script's models: tensors and modules of its own, all else shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from pipelines.loop.modules.bound_functions import bind_functions
from pipelines.loop.modules.model_views import plain
from pipelines.loop.modules.module_objects import objects_of
from pipelines.loop.modules.shared_attributes import SharedAttributes
from pipelines.training.models.joined_model import joined, roots_of


class CopyMemo(dict[int, Any]):
    """`deepcopy`'s memo, in which some objects count as copied when others are."""

    def __init__(self, copied: Mapping[int, Any], others: Mapping[int, int]) -> None:
        super().__init__(copied)
        self._others = others

    def get(self, key: int, default: Any = None) -> Any:
        return super().get(self._others.get(key, key), default)


def copy_models(models: Sequence[nn.Module]) -> nn.Module:
    """A copy of the models as one module; on the meta device if that is the default device.

    Modules, parameters and buffers are copied. All other objects are the script's, such as
    configurations and what a hook writes to. Those among them that hold parts of a model are
    copied with these, and kept the same by `SharedAttributes`.
    """
    views = [plain(model) for model in models]
    whole = joined(views)
    objects = objects_of(whole.modules(), models)
    memo = dict(objects.alone)
    if torch.get_default_device().type == "meta":
        for parameter in whole.parameters():
            empty = torch.empty_like(parameter, device="meta")
            memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
        for buffer in whole.buffers():
            memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    same = {id(model): id(view) for model, view in zip(models, views, strict=True)}
    copy_memo = CopyMemo(memo, same)
    copied: nn.Module = deepcopy(whole, copy_memo)
    bind_functions(whole.modules(), copy_memo)
    for model, part in zip(models, roots_of(copied), strict=True):
        SharedAttributes(model, part).add(objects.holding.values(), copy_memo)
    return copied
