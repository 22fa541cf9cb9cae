"""Corpora: where the text of a run comes from."""

from __future__ import annotations

import glob
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Set
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from pipelines.data.formats import READERS, documents_in, told
from pipelines.data.index import is_prepared
from pipelines.errors import UserError
from pipelines.home import expanded

KINDS = ", ".join(READERS)
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
"""Folders of the standard library that are not part of the default corpus."""


@dataclass(frozen=True)
class Corpus:
    """Files of documents, in the order in which they are read."""

    name: str
    files: tuple[Path, ...]

    def documents(self) -> Iterator[str]:
        """Every document that is not empty; raises `UserError` for a file that cannot be read."""
        for file in self.files:
            yield from filter(None, documents_in(file))

    def fingerprint(self) -> str:
        """Tells without reading it whether a corpus has changed: names, sizes and times."""
        seen = []
        for file in self.files:
            with told(file):
                seen.append((file.name, file.stat().st_size, file.stat().st_mtime_ns))
        return sha256(json.dumps(seen).encode()).hexdigest()


def find_corpus(data: str = "") -> Corpus:
    """The corpus that `--data` names: a file, folder or glob; '' is the standard library.

    A folder is searched with all its subfolders, but for hidden ones and those of prepared data;
    files are read in the order of their paths. Raises `UserError` if there is nothing to read.
    """
    if not data:
        return standard_library()
    path = expanded(data)
    if path.is_file() and path.suffix not in READERS:
        raise UserError(f"--data {data}: is no {KINDS} file; rename or convert it")
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = list(files_under(path))
    elif glob.has_magic(data):
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]
    else:
        raise UserError(f"--data {data}: no such file or folder; name one with {KINDS} files")
    files = sorted(file for file in found if file.suffix in READERS and file.is_file())
    if not files:
        raise UserError(f"--data {data}: holds no {KINDS} file; name files, a folder or a glob")
    return Corpus(data, tuple(files))


def standard_library() -> Corpus:
    """The text of this Python's standard library: some 700 files, 11 MB, always there."""
    root = Path(sysconfig.get_path("stdlib"))
    version = ".".join(map(str, sys.version_info[:3]))
    files = sorted(file for file in files_under(root, LEFT_OUT) if file.suffix == ".py")
    if not files:
        raise UserError(f"{root}: no sources of the standard library here; name text with --data")
    return Corpus(f"the Python {version} standard library", tuple(files))


def files_under(root: Path, left_out: Set[str] = frozenset()) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in left_out and name[0] != "." and not is_prepared(Path(folder, name))
        ]
        yield from (Path(folder, name) for name in names)
