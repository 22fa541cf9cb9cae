"""Gradients of parameters that the first and the last pipeline stage share, as a tied head does."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from actors.distributed.backends.torch_groups_private import PeerMessage, exchange_all
from actors.distributed.stall import wait_for
from actors.runtime.program import Groups
from elastic.geometry.layout import Layout
from pipelines.errors import UserError
from pipelines.settings import TrainSettings
from pipelines.training.workload.layer_tensors import tied_ends
from pipelines.training.workload.state import build_on_meta
from pipelines.training.workload.workload import Workload


def tied_parameters(workload: Workload, settings: TrainSettings, layout: Layout) -> Collection[str]:
    """The names of the parameters that two stages hold under this layout."""
    if layout.pp == 1:
        return ()
    return tied_ends(workload.shape().layers, build_on_meta(workload, settings))


class TiedGradients:
    """Sums the gradients of both stages, which hold the same shards of the parameters."""

    def __init__(self, names: Collection[str], groups: Groups) -> None:
        """`names` are those of the trained parameters that this rank shares with its peer, of
        which another rank of `fsdp` may have the gradients."""
        self._names = sorted(names)
        self._groups = groups

    @torch.no_grad()
    def sum(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the peer's gradients to these in place. Both ranks get the same bits, as a sum of two
        does not depend on their order."""
        if not self._names:
            return
        for name in self._names:
            if name not in gradients:
                raise UserError(
                    f"pp: the first and the last stage share {name}, but one of them does not "
                    "train it: let both compute with it, or set pp=1"
                )
        own = [gradients[name] for name in self._names]
        flat = [gradient.reshape(-1) for gradient in own]
        sent = (flat[0] if len(flat) == 1 else torch.cat(flat)).to(self._groups.device)
        received = torch.empty_like(sent)
        peer = self._groups.layout.pp - 1 - self._groups.place.pp
        for work in exchange_all(
            self._groups.mesh.get_group("pp"),
            self._groups.device,
            [PeerMessage(received, peer, 0)],
            [PeerMessage(sent, peer, 0)],
        ):
            wait_for(work)
        parts = received.split([gradient.numel() for gradient in own])
        for gradient, part in zip(own, parts, strict=True):
            gradient += part.view_as(gradient).to(gradient.device)
