"""Checkpoint folders: names, manifest, publishing, finding complete and damaged ones."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from urllib.parse import urlsplit

from actors.storage.errors import DamagedCheckpoint
from actors.storage.storage import Storage
from elastic.geometry.errors import InvalidLayout
from elastic.geometry.layout import Layout
from elastic.protocol.events import PartFile, Saved

FOLDER = "checkpoints"

MANIFEST, DAMAGED_MANIFEST = "manifest.json", "manifest.damaged.json"

FORMAT_VERSION = 4

READABLE_VERSIONS = (3, 4)
"""Files of version 3 have no `header_bytes`: reading one takes one more request."""

ONE_WORKER = Layout()

NOT_A_MANIFEST = (
    ValueError,
    OverflowError,  # an infinite number
    RecursionError,  # brackets nested too deep
    InvalidLayout,
    KeyError,
    TypeError,
    AttributeError,
)
"""Raised while parsing a file that is not a valid manifest."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint: its files, and the layout and workers that wrote them."""

    step: int
    generation: int
    files: tuple[PartFile, ...]
    layout: Layout
    members: tuple[str, ...]
    """In world-rank order."""


def part_name(worker: str, number: int = 0) -> str:
    """The name of the file that a worker writes, or of a further one of a large part."""
    return f"part-{worker}.{number}.safetensors" if number else f"part-{worker}.safetensors"


def part_names(worker: str, names: Container[str]) -> Iterator[str]:
    """Those of these names that are of the worker's part."""
    return takewhile(names.__contains__, (part_name(worker, number) for number in count()))


def folder_of(step: int, generation: int) -> str:
    """The folder of one attempt: a recomputed step never mixes with files of the first attempt."""
    return f"{FOLDER}/step-{step:08d}-g{generation}"


def read_manifest(checkpoint: Storage) -> Manifest:
    """Read a checkpoint's manifest.

    Raises `DamagedCheckpoint` if it is missing, unreadable, or of another format.
    """
    manifest_url = checkpoint.at(MANIFEST).url
    try:
        fields = json.loads(checkpoint.read(MANIFEST))
        version = fields["format_version"]
        if version not in READABLE_VERSIONS:
            raise DamagedCheckpoint(
                f"{manifest_url}: format_version {version} is not supported; this version reads "
                f"up to {FORMAT_VERSION}"
            )
        files = tuple(PartFile(name, **entry) for name, entry in fields["files"].items())
        layout, members = Layout(**fields["layout"]), tuple(fields["members"])
        manifest = Manifest(int(fields["step"]), int(fields["generation"]), files, layout, members)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{manifest_url}: the file is missing") from None
    except NOT_A_MANIFEST as error:
        raise DamagedCheckpoint(f"{manifest_url}: not a valid manifest ({error})") from None
    key = (manifest.step, manifest.generation)
    if _key(urlsplit(checkpoint.url).path) not in (None, key):
        raise DamagedCheckpoint(
            f"{manifest_url}: the manifest is of step {key[0]}, generation {key[1]}, but its "
            "folder is named for another checkpoint"
        )
    return manifest


def publish(
    run: Storage,
    step: int,
    generation: int,
    files: Iterable[PartFile],
    layout: Layout = ONE_WORKER,
    members: Sequence[str] = (),
) -> str:
    """Make a checkpoint visible by writing its manifest last (invariant 11); returns its URL.

    Raises `FileNotFoundError` if a part is missing, `OSError` if it has another size or storage
    fails.
    """
    checkpoint, files = run.at(folder_of(step, generation)), tuple(files)
    sizes = checkpoint.files()
    for file in files:
        if sizes.get(file.name) != file.num_bytes:
            url = checkpoint.at(file.name).url
            if file.name not in sizes:
                raise FileNotFoundError(f"{url} is missing")
            raise OSError(f"{url} has {sizes.get(file.name)} bytes, not {file.num_bytes}")
    manifest = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "generation": generation,
        "layout": asdict(layout),
        "members": list(members),
        "files": {file.name: _manifest_entry(file) for file in files},
    }
    checkpoint.write(MANIFEST, json.dumps(manifest, indent=1).encode())
    return checkpoint.url


def _manifest_entry(file: PartFile) -> dict[str, int]:
    return {key: value for key, value in asdict(file).items() if key != "name"}


def set_aside(checkpoint: Storage) -> None:
    """Hide a damaged checkpoint by renaming its manifest; no file is deleted."""
    checkpoint.write(DAMAGED_MANIFEST, checkpoint.read(MANIFEST))
    checkpoint.remove(MANIFEST)


@dataclass(frozen=True)
class FoundCheckpoints:
    """The checkpoints in storage when a run is opened.

    `whole`: published, every part present in its full size, oldest first (the contents of a part
    are checked when it is read). `complaints`: one message for each other published checkpoint.
    `unfinished`: (step, generation) of those never published.
    """

    whole: tuple[Saved, ...]
    complaints: tuple[str, ...]
    unfinished: tuple[tuple[int, int], ...]
    damaged: tuple[str, ...] = ()
    """The folders that the complaints are about."""
    newest_generation: int = 0
    """The newest generation of any checkpoint folder."""


def find_checkpoints(run: Storage) -> FoundCheckpoints:
    """List a run's checkpoints. Raises OSError if storage does not answer."""
    sizes = run.files(FOLDER)
    whole: list[Saved] = []
    complaints: list[str] = []
    unfinished: list[tuple[int, int]] = []
    damaged_folders: list[str] = []
    generations: list[int] = []
    for name in sorted({"/".join(file.split("/")[:2]) for file in sizes}):
        checkpoint, key = run.at(name), _key(name)
        generations += [key[1]] if key else []
        if f"{name}/{MANIFEST}" not in sizes:
            is_aside = f"{name}/{DAMAGED_MANIFEST}" in sizes
            unfinished += [key] if key and not is_aside else []
            continue
        try:
            manifest = read_manifest(checkpoint)
        except DamagedCheckpoint as error:
            complaints.append(f"{error}: skipped")
            damaged_folders.append(name)
            continue
        damaged = [f for f in manifest.files if sizes.get(f"{name}/{f.name}") != f.num_bytes]
        if damaged:
            url = checkpoint.at(damaged[0].name).url
            complaints.append(f"{url}: the file is missing or truncated: skipped")
            damaged_folders.append(name)
        else:
            whole.append(Saved(manifest.step, manifest.generation, checkpoint.url))
    whole.sort(key=lambda saved: (saved.step, saved.generation))
    return FoundCheckpoints(
        tuple(whole),
        tuple(complaints),
        tuple(unfinished),
        tuple(damaged_folders),
        max(generations, default=0),
    )


def _key(folder: str) -> tuple[int, int] | None:
    match = re.fullmatch(r".*/step-(\d+)-g(\d+)", folder)
    return (int(match[1]), int(match[2])) if match else None
