"""Random tokens: synthetic samples for benchmarks and tests (`--data random`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256

import numpy as np

from pipelines.data.windows import Batch, batch_of


class RandomWindows:
    """Windows of a stream whose token at each position is a keyed function of that position.

    Small token ids are more likely (the product of two uniform numbers), so that there is
    something to learn. The whole stream is one document. Each split has its own key.
    """

    is_far = False

    def __init__(
        self,
        split: str,
        seq_len: int,
        *,
        vocab_size: int = 257,
        num_samples: int = 1 << 20,
        seed: int = 0,
        with_documents: bool = True,
    ) -> None:
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.num_samples = num_samples
        self._with_documents = with_documents
        self.digest = sha256(f"random/{vocab_size}/{seed}".encode()).hexdigest()
        key = sha256(f"{self.digest}/{split}".encode()).digest()
        self._key = np.uint64(int.from_bytes(key[:8], "little"))

    def read(self, indices: Sequence[int]) -> Batch:
        """These windows as one batch; raises `IndexError` for one that does not exist."""
        firsts = np.asarray(indices, dtype=np.int64).reshape(-1, 1)
        if ((firsts < 0) | (firsts >= self.num_samples)).any():
            raise IndexError(f"a sample of {list(indices)} is outside 0..{self.num_samples - 1}")
        positions = firsts * self.seq_len + np.arange(self.seq_len + 1)
        bits = mixed(positions.astype(np.uint64) + self._key)
        low = np.uint64(0xFFFFFFFF)
        skewed = ((bits >> 32) * (bits & low)) >> 32
        tokens = (skewed * np.uint64(self.vocab_size) >> 32).astype(np.int64)
        shape = (len(indices), self.seq_len)
        return batch_of(tokens, np.zeros(shape, np.int32) if self._with_documents else None)

    def reach(self) -> None:
        """Nothing to do: the samples are computed."""

    def prefetch(self, indices: Sequence[int]) -> None:
        """Nothing to do: the samples are computed."""

    def fetch(self, indices: Sequence[int], interrupt: Callable[[], None]) -> None:
        """Nothing to do: the samples are computed."""


def mixed(bits: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64, elementwise (see `elastic.geometry.sample_order.mixed`)."""
    bits = (bits ^ (bits >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> 27)) * np.uint64(0x94D049BB133111EB)
    finalised: np.ndarray = bits ^ (bits >> 31)
    return finalised
