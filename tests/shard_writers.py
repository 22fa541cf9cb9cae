"""Writers of tar and MDS shards, as WebDataset and MosaicML Streaming lay them out."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": lambda content: bytes(pa.compress(content, codec="zstd", asbytes=True)),
    "br": lambda content: bytes(pa.compress(content, codec="brotli", asbytes=True)),
    "gz": gzip.compress,
    "bz2": bz2.compress,
}
"""By the names of MosaicML Streaming, which may be followed by a level."""


def write_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_mds(
    folder: Path,
    columns: Mapping[str, tuple[str, int | None]],
    samples: Sequence[Mapping[str, bytes]],
    num_in_shard: int,
    compression: str | None = None,
) -> Path:
    """`columns` are encodings and fixed sizes by name; `samples` are encoded values."""
    folder.mkdir(parents=True)
    names = sorted(columns)
    config = {
        "column_encodings": [columns[name][0] for name in names],
        "column_names": names,
        "column_sizes": [columns[name][1] for name in names],
        "compression": f"{compression}:3" if compression else None,
        "format": "mds",
        "hashes": ["sha1"],
        "size_limit": 1 << 26,
        "version": 2,
    }
    shards = []
    for first in range(0, len(samples), num_in_shard):
        number = first // num_in_shard
        content = mds_shard(config, names, samples[first : first + num_in_shard])
        facts = {"raw_data": _store(folder, f"shard.{number:05d}.mds", content, not compression)}
        facts["zip_data"] = None
        if compression:
            zipped = COMPRESS[compression](content)
            name = f"shard.{number:05d}.mds.{compression}"
            facts["zip_data"] = _store(folder, name, zipped, True)
        count = len(samples[first : first + num_in_shard])
        shards.append({**config, **facts, "samples": count})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def mds_shard(
    config: Mapping[str, object], names: Sequence[str], samples: Sequence[Mapping[str, bytes]]
) -> bytes:
    sizes: object = config["column_sizes"]
    assert isinstance(sizes, list)
    parts = []
    for sample in samples:
        values = [sample[name] for name in names]
        variable = [len(v) for v, size in zip(values, sizes, strict=True) if size is None]
        parts.append(np.array(variable, np.uint32).tobytes() + b"".join(values))
    head = json.dumps(config, sort_keys=True).encode()
    offsets = np.cumsum([0, *map(len, parts)]) + 4 + 4 * (len(parts) + 1) + len(head)
    return b"".join(
        (np.uint32(len(parts)).tobytes(), offsets.astype(np.uint32).tobytes(), head, *parts)
    )


def _store(folder: Path, name: str, content: bytes, is_written: bool) -> dict[str, object]:
    if is_written:
        (folder / name).write_bytes(content)
    digest = hashlib.sha1(content).hexdigest()
    return {"basename": name, "bytes": len(content), "hashes": {"sha1": digest}}
