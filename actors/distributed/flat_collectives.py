"""`all_gather` and `reduce_scatter` of flat tensors, under the names of any torch version."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""From torch 2.13 the old names warn."""
