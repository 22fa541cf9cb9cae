"""Dropout that is the same under every layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from elastic.geometry.regions import chunk_interval
from elastic.geometry.sample_order import mixed
from pipelines.training.workload.parallel_groups import ParallelGroups
from pipelines.training.workload.ring import positions


class KeyedDropout(nn.Module):
    """Dropout (Srivastava et al., 2014) keyed by a microbatch's seed and this layer's number.

    Each rank draws the mask of all tokens of a microbatch and takes its own part, so that every
    layout drops the same elements, however many microbatches a pass has.
    """

    def __init__(self, probability: float, parallel: ParallelGroups, number: int) -> None:
        super().__init__()
        self.probability = probability
        self.parallel = parallel
        self.number = number

    def forward(self, hidden: Tensor, seeds: tuple[int, ...] | None) -> Tensor:
        """Apply dropout to hidden states (batch, length, dim), if there are seeds: one for each of
        the pass' microbatches, which divide the batch evenly."""
        if seeds is None or not self.probability:
            return hidden
        held, length = self._positions(hidden)
        shape = (hidden.shape[0] // len(seeds), length, hidden.shape[2])
        masks = [self._drawn(seed, shape, hidden.device) for seed in seeds]
        drawn = masks[0] if len(masks) == 1 else torch.cat(masks)
        mask = drawn[:, held] if held is not None else drawn
        return hidden * (mask >= self.probability) / (1 - self.probability)

    def _drawn(self, seed: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
        generator = torch.Generator(device).manual_seed(mixed(seed ^ self.number << 48) >> 1)
        return torch.rand(shape, generator=generator, device=device)

    def _positions(self, hidden: Tensor) -> tuple[Tensor | None, int]:
        """The positions of these hidden states in the sequence (None: all), and its length."""
        parallel = self.parallel
        if parallel.has_whole_sequences:
            return None, hidden.shape[1]
        held = positions(parallel.seq_len, parallel.cp_rank, parallel.num_cp).to(hidden.device)
        begin, size = chunk_interval(len(held), parallel.num_tp, parallel.tp_rank)
        return held[begin : begin + size], parallel.seq_len
