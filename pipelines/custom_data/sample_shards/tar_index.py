"""The index of a tar file: its samples, and where their fields lie. Nothing is extracted."""

from __future__ import annotations

import io
import json
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from pipelines.data.cache.shared_indexes import digest_of
from pipelines.errors import UserError

FORMAT = "tar index 1"
BLOCK_BYTES = 512
MAX_HEADER_BYTES = 1 << 20
"""A larger header is no name of a file, and might fill the memory."""
NAME = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)", re.DOTALL)
"""The key, up to the first dot of the last part, and the field. Hidden files have none."""
METADATA = re.compile(r"__[^/]*__($|/)")
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}
WHAT_TO_DO = "fetch or write it again"

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TarIndex:
    """Arrays with an entry for each sample or field, as a data set may have 100 million samples."""

    names: tuple[str, ...]
    """The names of fields, such as `jpg`."""
    keys: bytes
    """The keys of all samples, one after the other."""
    key_ends: Ints
    field_ends: Ints
    """Of each sample, the number of fields up to its last one."""
    name_numbers: Ints
    offsets: Ints
    sizes: Ints

    @property
    def num_samples(self) -> int:
        return len(self.key_ends)

    def key(self, sample: int) -> str:
        first = int(self.key_ends[sample - 1]) if sample else 0
        return self.keys[first : int(self.key_ends[sample])].decode("utf-8", "backslashreplace")

    def fields(self, sample: int) -> list[tuple[str, int, int]]:
        """The name of each field of a sample, and the offset and size of its content."""
        first = int(self.field_ends[sample - 1]) if sample else 0
        return [
            (self.names[self.name_numbers[i]], int(self.offsets[i]), int(self.sizes[i]))
            for i in range(first, int(self.field_ends[sample]))
        ]

    def sample_without(self, name: str) -> int | None:
        """The first sample that has no field of this name."""
        has_field = np.zeros(self.num_samples, dtype=bool)
        if name in self.names:
            places = np.flatnonzero(self.name_numbers == self.names.index(name))
            has_field[np.searchsorted(self.field_ends, places, side="right")] = True
        return None if has_field.all() else int(has_field.argmin())

    def to_bytes(self) -> bytes:
        """As an archive of NumPy, whose checksums show damage."""
        arrays = {
            name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)
        }
        texts = {"names": json.dumps(self.names).encode(), "keys": self.keys}
        np.savez(
            out := io.BytesIO(),
            allow_pickle=False,
            **arrays,
            **{name: np.frombuffer(text, np.uint8) for name, text in texts.items()},
        )
        return out.getvalue()

    def digest(self) -> str:
        """Equal for files with the same samples at the same places."""
        arrays = [value for value in vars(self).values() if isinstance(value, np.ndarray)]
        contents = [value.astype("<i8").tobytes() for value in arrays]
        return digest_of([json.dumps(self.names).encode(), self.keys, *contents])

    @classmethod
    def from_bytes(cls, content: bytes) -> TarIndex:
        """Raises `ValueError`, `KeyError`, `OSError` or `zipfile.BadZipFile` if it is damaged."""
        with np.load(io.BytesIO(content), allow_pickle=False) as loaded:
            arrays = {name: loaded[name] for name in loaded.files}
        texts = {name: arrays.pop(name).tobytes() for name in ("names", "keys")}
        return cls(tuple(json.loads(texts["names"])), texts["keys"], **arrays)


def index_tar(path: Path, shown: str) -> TarIndex:
    """Read the headers of a tar file, which messages name as `shown`.

    Members are grouped as WebDataset groups them: the key is the name up to the first dot of its
    last part, the field what follows, in lower case. Folders, hidden files, names without a dot and
    WebDataset's metadata are skipped. Raises `UserError` for what would be lost in silence: a file
    that was cut off or is damaged, links, fields that occur twice, samples whose files are not
    neighbours.
    """
    rows = _Rows(shown)
    try:
        with path.open("rb") as file:
            _refuse_compressed(file, shown)
            size = path.stat().st_size
            with tarfile.open(fileobj=_Headers(file), mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined]  # it would keep all of them
                    rows.add(member, size)
                _refuse_unfinished(file, tar.offset, shown)
    except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{shown}: cannot be read as tar ({reason}); {WHAT_TO_DO}") from None
    return rows.index()


class _Headers(io.RawIOBase):
    """The headers of a tar file, which are read; a header that claims to be huge is refused."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


class _Rows:
    """The index, while members are added."""

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._keys: dict[str, None] = {}
        self._key = ""
        self._present: set[str] = set()
        self._names: dict[str, int] = {}
        self._field_ends: list[int] = []
        self._fields: list[tuple[int, int, int]] = []
        self._end = 0

    def add(self, member: tarfile.TarInfo, num_bytes: int) -> None:
        """Add a member of a tar file of so many bytes. Raises `UserError`."""
        name = member.name
        end = member.offset_data + member.size
        if member.size < 0 or member.offset_data < self._end or end > num_bytes:
            raise self._refused(name, f"ends at byte {end} of {num_bytes}", WHAT_TO_DO)
        self._end = end
        if name.startswith("/") or ".." in name.split("/"):
            raise self._refused(name, "has a name outside of the archive", "use relative names")
        if member.issym() or member.islnk():
            advice = "write the tar with --dereference --hard-dereference"
            raise self._refused(name, f"is a link to {member.linkname!r}", advice)
        if member.isdir() or METADATA.match(name):
            return
        if not member.isreg() or member.issparse():
            raise self._refused(name, "is no plain file", "leave it out of the tar")
        if (parts := NAME.fullmatch(name)) is not None:
            self._add_field(name, parts[1], parts[2].lower(), member)

    def _add_field(self, name: str, key: str, field: str, member: tarfile.TarInfo) -> None:
        if not self._keys or key != self._key:
            if key in self._keys:
                advice = "write the tar sorted by name (tar --sort=name)"
                raise self._refused(name, f"is apart from the other files of {key!r}", advice)
            self._keys[key] = None
            self._key, self._present = key, set()
            self._field_ends.append(len(self._fields))
        if field in self._present:
            raise self._refused(name, f"is a second field {field!r} of {key!r}", "rename one")
        self._present.add(field)
        number = self._names.setdefault(field, len(self._names))
        self._fields.append((number, member.offset_data, member.size))
        self._field_ends[-1] = len(self._fields)

    def _refused(self, name: str, what: str, advice: str) -> UserError:
        return UserError(f"{self._shown}: the member {name!r} {what}; {advice}")

    def index(self) -> TarIndex:
        keys = [key.encode("utf-8", "surrogateescape") for key in self._keys]
        fields = np.array(self._fields, np.int64).reshape(-1, 3)
        return TarIndex(
            tuple(self._names),
            b"".join(keys),
            np.cumsum([len(key) for key in keys], dtype=np.int64),
            np.array(self._field_ends, np.int64),
            *(np.ascontiguousarray(column) for column in fields.T),
        )


def _refuse_compressed(file: BinaryIO, shown: str) -> None:
    kind = COMPRESSED.get(file.read(2))
    file.seek(0)
    if kind is not None:
        raise UserError(
            f"{shown}: is compressed with {kind}, so that no sample can be read by itself; "
            "decompress it"
        )


def _refuse_unfinished(file: BinaryIO, offset: int, shown: str) -> None:
    """`tarfile` takes a damaged header, and the end of the file, for the end of the archive."""
    file.seek(offset)
    block = file.read(BLOCK_BYTES)
    if len(block) < BLOCK_BYTES:
        raise UserError(f"{shown}: has been cut off at byte {offset + len(block)}; {WHAT_TO_DO}")
    if any(block):
        raise UserError(f"{shown}: has a damaged header at byte {offset}; {WHAT_TO_DO}")
