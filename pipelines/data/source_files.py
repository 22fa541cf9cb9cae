"""The files that a user names, on this machine or at a URL: one, a folder, a pattern, a list."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from glob import glob
from itertools import chain
from pathlib import Path

from actors.storage.credentials import without_credentials
from actors.storage.remote_files import RemoteFile, remote_files
from actors.storage.storage import is_remote
from pipelines.errors import UserError
from pipelines.settings.home import expand_home

SourceFile = Path | RemoteFile
Named = str | Path | Sequence[str | Path]

RANGE = re.compile(r"(\d+)\.\.(\d+)")
BRACES = re.compile(rf"\{{({RANGE.pattern}|[^{{}}]*,[^{{}}]*)\}}")
MAX_NAMES = 1_000_000


def listed_files(url: str, shown: str) -> list[RemoteFile]:
    """The files at a URL, which messages show as `shown`. Raises `UserError` if they cannot be
    listed."""
    try:
        return remote_files(url)
    except (OSError, ValueError, ImportError) as error:
        cause = without_credentials(str(error).splitlines()[0])
        raise UserError(
            f"{shown}: cannot be listed ({cause}); check the URL, this machine's network and the "
            "credentials in its environment"
        ) from None


def named_files(named: Named, suffixes: Sequence[str]) -> list[SourceFile]:
    """The files with one of these suffixes that each name stands for, in the order of the names.

    A name is a file, a folder, which is searched recursively, or a glob. `{000..099}` stands for
    each number, and `{a,b}` for each word. Files of a folder or a glob are sorted. Raises
    `UserError` for a name without files.
    """
    names = [named] if isinstance(named, str | Path) else list(named)
    expanded = [name for text in names for name in expand_braces(str(text))]
    found = chain.from_iterable(_files(name, suffixes) for name in expanded)
    if not (files := list(found)):
        raise UserError("an empty list of files: name a file, a folder or a pattern")
    return files


def place_of(file: SourceFile) -> str:
    """The path or the URL of a file."""
    return file.url if isinstance(file, RemoteFile) else str(file)


def state_of(file: SourceFile) -> tuple[object, ...]:
    """What changes with the content of a file. Raises `OSError`."""
    if isinstance(file, RemoteFile):
        return file.num_bytes, file.version
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def expand_braces(text: str) -> list[str]:
    """The names that a text with braces stands for, as in a shell. Raises `UserError`."""
    names = [text]
    while match := BRACES.search(names[0]):  # every name has the same braces at the same place
        options = list(_options(match, text))
        if len(names) * len(options) > MAX_NAMES:
            raise UserError(f"{text}: stands for more than {MAX_NAMES} files; name fewer")
        names = [
            BRACES.sub(lambda _, option=option: option, name, count=1)  # type: ignore[misc]
            for name in names
            for option in options
        ]
    return names


def _options(match: re.Match[str], text: str) -> Iterator[str]:
    if (numbers := RANGE.fullmatch(match[1])) is None:
        yield from match[1].split(",")
        return
    first, last = numbers.groups()
    if not int(first) <= int(last) < int(first) + MAX_NAMES:
        raise UserError(f"{text}: {{{match[1]}}} must count upwards, at most {MAX_NAMES} numbers")
    width = len(first) if first.startswith("0") or last.startswith("0") else 0
    for number in range(int(first), int(last) + 1):
        yield f"{number:0{width}d}"


def _files(name: str, suffixes: Sequence[str]) -> Sequence[SourceFile]:
    if is_remote(name):
        shown = without_credentials(name)
        listed = listed_files(name, shown)
        files: list[SourceFile] = [file for file in listed if file.suffix in suffixes]
    else:
        shown, place = name, expand_home(name.removeprefix("file://"))
        if place.is_dir():
            found = [file for suffix in suffixes for file in place.rglob(f"*{suffix}")]
        elif place.exists():
            found = [place]
        else:
            found = [Path(file) for file in glob(str(place), recursive=True)]
        files = [*sorted(file.resolve() for file in found)]
    if not files:
        kinds = " or ".join(suffixes)
        raise UserError(f"{shown}: there is no {kinds} file; name a file or folder")
    return files
