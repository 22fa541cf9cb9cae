"""Corpora: the text files that `--data` names, and a reader of documents for each format."""

from __future__ import annotations

import glob
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from actors.storage.content_versions import Version
from actors.storage.credentials import without_credentials
from actors.storage.remote_files import RemoteFile
from actors.storage.storage import is_remote
from pipelines.data.shards import INDEX, is_prepared
from pipelines.data.source_files import SourceFile, listed_files
from pipelines.errors import UserError
from pipelines.settings.home import expand_home

COLUMN = "text"
"""The column or JSON field that holds a document."""
NUM_ROWS_AT_ONCE = 64
READ_BYTES = 1 << 20
WHOLE_TEXT_BYTES = 1 << 20
"""A text file up to this size is one document; a larger one is split into several."""
PART_CHARS = 1 << 16
"""The length of a document of a split text file, extended to the end of its line."""
EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
"""Folders of the standard library that are not part of the default corpus."""


@dataclass(frozen=True)
class Corpus:
    """Files of documents, in the order in which they are read."""

    name: str
    files: tuple[SourceFile, ...]

    def documents(self) -> Iterator[str]:
        """Every document that is not empty; raises `UserError` for a file that cannot be read."""
        for file in self.files:
            yield from filter(None, documents_in(file))

    def fingerprint(self) -> str:
        """A digest of names, sizes and versions: it detects a changed corpus without reading it."""
        seen = []
        for file in self.files:
            with file_errors_reported(file):
                seen.append((file.name, *_size_and_version(file)))
        return sha256(json.dumps(seen).encode()).hexdigest()

    def num_bytes(self) -> int:
        """The sizes of all files together."""
        return sum(_size_and_version(file)[0] for file in self.files)


def find_corpus(data: str = "") -> Corpus:
    """The corpus that `--data` names: a file, folder or glob, also at a URL; '' is the standard
    library.

    A folder is searched recursively, except hidden folders and folders of prepared data. Files are
    read in the order of their paths. Raises `UserError` if there is nothing to read.
    """
    if not data:
        return standard_library()
    if is_remote(data):
        return _remote_corpus(data)
    path = expand_home(data.removeprefix("file://"))
    if path.is_file() and path.suffix not in READERS:
        raise UserError(f"--data {data}: not a {KINDS} file; rename or convert it")
    if path.is_file():
        candidates = [path]
    elif path.is_dir():
        candidates = list(files_under(path))
    elif glob.has_magic(data):
        candidates = [Path(name) for name in glob.glob(str(path), recursive=True)]
    else:
        raise UserError(f"--data {data}: no such file or folder; name one with {KINDS} files")
    files = sorted(file for file in candidates if file.suffix in READERS and file.is_file())
    if not files:
        raise UserError(f"--data {data}: has no {KINDS} file; name files, a folder or a glob")
    return Corpus(data, tuple(files))


def _remote_corpus(data: str) -> Corpus:
    shown = without_credentials(data)
    found = listed_files(data, f"--data {shown}")
    prepared = {file.path.removesuffix(INDEX) for file in found if file.name == INDEX}
    files = [
        file
        for file in found
        if file.suffix in READERS and not file.path.startswith(tuple(prepared))
    ]
    if not files:
        raise UserError(f"--data {shown}: has no {KINDS} file; name files, a folder or a pattern")
    return Corpus(shown, tuple(files))


def _size_and_version(file: SourceFile) -> tuple[int, Version]:
    if isinstance(file, RemoteFile):
        return file.num_bytes, file.version
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def standard_library() -> Corpus:
    """The source files of this Python's standard library: about 700 files, 11 MB, always there."""
    root = Path(sysconfig.get_path("stdlib"))
    version = ".".join(map(str, sys.version_info[:3]))
    files = sorted(file for file in files_under(root, EXCLUDED) if file.suffix == ".py")
    if not files:
        raise UserError(f"{root}: has no sources of the standard library; name text with --data")
    return Corpus(f"the Python {version} standard library", tuple(files))


def files_under(root: Path, excluded: Set[str] = frozenset()) -> Iterator[Path]:
    """The files in a folder and its subfolders, except hidden, excluded and prepared ones."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in excluded and name[0] != "." and not is_prepared(Path(folder, name))
        ]
        yield from (Path(folder, name) for name in names)


def documents_in(file: SourceFile) -> Iterator[str]:
    """The documents of a file, in order, by the reader for its suffix (others: as plain text).

    Raises `UserError`, naming the file, if it cannot be opened or is not what its suffix says.
    """
    with file_errors_reported(file), _local(file) as path:
        yield from READERS.get(file.suffix, text_documents)(path, str(file))


def _local(file: SourceFile) -> AbstractContextManager[Path]:
    return file.local() if isinstance(file, RemoteFile) else nullcontext(file)


@contextmanager
def file_errors_reported(file: SourceFile) -> Iterator[None]:
    """Turn an error of reading the file into a one-line `UserError`."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: not UTF-8 text ({error.reason}); convert it or leave it out"
        ) from error
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{file}: cannot be read as {file.suffix or 'text'} ({reason}); fix it or leave it out"
        ) from error


def text_documents(file: Path, shown: str) -> Iterator[str]:
    """A plain text file: one document, or several if it is larger than `WHOLE_TEXT_BYTES`."""
    with file.open(encoding="utf-8-sig", newline="") as text:
        if file.stat().st_size <= WHOLE_TEXT_BYTES:
            yield text.read()
            return
        while part := text.read(PART_CHARS):
            yield part + text.readline(PART_CHARS)


def jsonl_documents(file: Path, shown: str) -> Iterator[str]:
    """One JSON object a line, whose field `text` is the document; blank lines are skipped."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.isspace():
                yield jsonl_text(line, f"{shown}, line {number}")


def jsonl_text(line: bytes, where: str) -> str:
    """The document in one line of JSON. Raises `UserError`, whose message begins with `where`."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error}); fix or remove the line") from error
    text = record.get(COLUMN) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(f'{where}: has no text; each line is an object like {{"{COLUMN}": "..."}}')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: has half a surrogate pair; fix or remove the line") from error
    return text


def parquet_documents(file: Path, shown: str) -> Iterator[str]:
    """The column `text` of a Parquet file, one document a row; nulls are skipped."""
    with pq.ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False) as table:
        check_column(shown, table.schema_arrow)
        # With one column, threads gain nothing, and each would keep a heap.
        for batch in table.iter_batches(NUM_ROWS_AT_ONCE, columns=[COLUMN], use_threads=False):
            yield from texts(batch)


def arrow_documents(file: Path, shown: str) -> Iterator[str]:
    """The column `text` of an Arrow IPC file or stream, one document a row; nulls are skipped."""
    with pa.OSFile(str(file)) as opened:
        is_file = opened.read(6) == b"ARROW1"
        opened.seek(0)
        reader = pa.ipc.open_file(opened) if is_file else pa.ipc.open_stream(opened)
        check_column(shown, reader.schema)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            yield from texts(batch)


def check_column(shown: str, schema: pa.Schema) -> None:
    """Raise `UserError` if a table has no column of text."""
    if COLUMN not in schema.names:
        raise UserError(
            f"{shown}: has no column '{COLUMN}', only {', '.join(schema.names)}; rename one to it"
        )
    kind = schema.field(COLUMN).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if kind not in (pa.string(), pa.large_string(), pa.string_view()):
        raise UserError(f"{shown}: column '{COLUMN}' is {kind}, not text; cast it to string")


def texts(batch: pa.RecordBatch) -> Iterator[str]:
    """The documents of a record batch, without nulls."""
    column = batch.column(COLUMN)
    for first in range(0, len(column), NUM_ROWS_AT_ONCE):
        for text in column.slice(first, NUM_ROWS_AT_ONCE).to_pylist():
            if text is not None:
                yield text


READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".txt": text_documents,
    ".jsonl": jsonl_documents,
    ".parquet": parquet_documents,
    ".arrow": arrow_documents,
}
"""The reader of each format, by file suffix; it gets a local file, and its name in messages."""
KINDS = ", ".join(READERS)
