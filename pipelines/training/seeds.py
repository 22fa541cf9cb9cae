"""Random generators keyed by what they are for."""

from __future__ import annotations

from hashlib import blake2b

from torch import Generator


def keyed_generator(*key: str | int) -> Generator:
    """A host generator whose stream is a function of the key alone, on any machine."""
    text = "/".join(str(part) for part in key)
    digest = blake2b(text.encode(), digest_size=8).digest()
    return Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
