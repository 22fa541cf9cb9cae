"""A site's own health check, which no machine passes."""

from __future__ import annotations

import torch


def check(device: torch.device) -> str:
    return f"this site refuses {device}"
