"""What the fork server imports before it forks children, so that none of them does it again."""

from __future__ import annotations

import encodings.idna
import gc

import numpy.ma
import torch.distributed.pipelining
import torch.profiler

from actors.runtime.code_digest import digest_of_sources
from actors.worker.worker import Worker

__all__ = ["Worker", "encodings", "numpy", "torch"]

digest_of_sources()  # of the sources that the children run
gc.freeze()  # else each child's collections would copy the objects of all imports
