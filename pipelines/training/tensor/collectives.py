"""Parameters of which each rank computes with the whole, gathered and reduced by the bucket."""

from __future__ import annotations

import torch.distributed as dist

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Their names from torch 2.13 on, which warns of those before."""
