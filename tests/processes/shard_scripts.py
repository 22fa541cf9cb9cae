"""A script that trains on samples in tar and MDS shards, with a reader process."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data_scripts import LENGTH, samples, train
from loops import MICROBATCH
from shard_writers import write_mds, write_tar
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader

from pipelines.custom_data import MdsDataset, TarDataset
from pipelines.loop import Run
from pipelines.settings import CacheSettings

SHARDS = "SHARDS_FOLDER"
NUM_IN_SHARD = 9
NUM_IN_TAR = 27


def write_shards(folder: Path) -> None:
    """The samples of `data_scripts`, the first in three tar files and the others in MDS shards."""
    rows = [(point.numpy(), int(label)) for point, label in samples()]
    for first in range(0, NUM_IN_TAR, NUM_IN_SHARD):
        members = []
        for number in range(first, first + NUM_IN_SHARD):
            point, label = rows[number]
            np.save(out := io.BytesIO(), point)
            members += [(f"{number:03d}.npy", out.getvalue()), (f"{number:03d}.cls", b"%d" % label)]
        write_tar(folder / f"shard-{first // NUM_IN_SHARD:06d}.tar", members)
    columns = {"point": ("ndarray:float64:8", 64), "label": ("int", 8)}
    values = [
        {"point": point.tobytes(), "label": np.int64(label).tobytes()}
        for point, label in rows[NUM_IN_TAR:LENGTH]
    ]
    write_mds(folder / "mds", columns, values, NUM_IN_SHARD, "zstd")


def of_tar(sample: dict[str, Any]) -> tuple[Tensor, int]:
    return torch.from_numpy(sample["npy"]), sample["cls"]


def of_mds(sample: dict[str, Any]) -> tuple[Tensor, int]:
    return torch.from_numpy(sample["point"]), sample["label"]


def from_shards(run: Run) -> None:
    """The tar files are at a URL, from which they are copied to the cache of the machine."""
    folder = os.environ[SHARDS]
    cache = CacheSettings(folder=f"{folder}/cache")
    url = f"local://{folder}/shard-{{000000..000002}}.tar"
    first = TarDataset(url, transform=of_tar, cache=cache)
    others = MdsDataset(f"{folder}/mds", transform=of_mds, cache=cache)
    both: Any = ConcatDataset([first, others])  # type: ignore[list-item]
    train(run, DataLoader(both, batch_size=MICROBATCH, num_workers=1))
