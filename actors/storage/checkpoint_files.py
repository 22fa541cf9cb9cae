"""Where checkpoints lie, when one is whole, and how it is made visible and removed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

from actors.storage.errors import DamagedCheckpoint
from actors.storage.storage import Storage
from elastic.geometry.errors import InvalidLayout
from elastic.geometry.layout import Layout
from elastic.protocol.events import PartFile, Saved

FOLDER = "checkpoints"

MANIFEST, ASIDE = "manifest.json", "manifest.damaged.json"

FORMAT_VERSION = 4

READABLE_VERSIONS = (3, 4)
"""Files of version 3 have no `header_bytes`: reading one takes a request more."""

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
"""What reading JSON of another kind raises."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    step: int
    generation: int
    files: tuple[PartFile, ...]
    layout: Layout
    members: tuple[str, ...]
    """In world-rank order."""


def part_name(worker: str) -> str:
    """The file that a worker writes."""
    return f"part-{worker}.safetensors"


def folder_of(step: int, generation: int) -> str:
    """A folder of its own for each try: a redone step never meets the files of the first."""
    return f"{FOLDER}/step-{step:08d}-g{generation}"


def read_manifest(checkpoint: Storage) -> Manifest:
    """Raises `DamagedCheckpoint` if there is none that can be read, or of another format."""
    place = checkpoint.at(MANIFEST).url
    try:
        fields = json.loads(checkpoint.read(MANIFEST))
        version = fields["format_version"]
        if version not in READABLE_VERSIONS:
            raise DamagedCheckpoint(
                f"{place}: format_version {version}, and this reads {FORMAT_VERSION}"
            )
        files = tuple(PartFile(name, **told) for name, told in fields["files"].items())
        layout, members = Layout(**fields["layout"]), tuple(fields["members"])
        manifest = Manifest(int(fields["step"]), int(fields["generation"]), files, layout, members)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{place}: it is not there") from None
    except NOT_A_MANIFEST as error:
        raise DamagedCheckpoint(f"{place}: it is no manifest ({error})") from None
    key = (manifest.step, manifest.generation)
    if _key(urlsplit(checkpoint.url).path) not in (None, key):
        raise DamagedCheckpoint(
            f"{place}: it is of step {key[0]} and generation {key[1]}, and its folder is of others"
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

    Raises `OSError` if a part is not there in its full size, or the storage refuses.
    """
    checkpoint, files = run.at(folder_of(step, generation)), tuple(files)
    there = checkpoint.files()
    for file in files:
        if there.get(file.name) != file.num_bytes:
            url = checkpoint.at(file.name).url
            raise OSError(f"{url} has {there.get(file.name)} bytes, not {file.num_bytes}")
    manifest = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "generation": generation,
        "layout": asdict(layout),
        "members": list(members),
        "files": {file.name: _facts(file) for file in files},
    }
    checkpoint.write(MANIFEST, json.dumps(manifest, indent=1).encode())
    return checkpoint.url


def _facts(file: PartFile) -> dict[str, int]:
    return {key: value for key, value in asdict(file).items() if key != "name"}


def set_aside(checkpoint: Storage) -> None:
    """Hide a damaged checkpoint; all its files stay."""
    checkpoint.write(ASIDE, checkpoint.read(MANIFEST))
    checkpoint.remove(MANIFEST)


@dataclass(frozen=True)
class FoundCheckpoints:
    """What lies in storage when a run is opened.

    `whole` are the checkpoints whose parts are all there in their full size, the oldest first (what
    the parts contain is checked when they are read); `complaints` tell of others that have been
    published; `unfinished` never were (step, generation).
    """

    whole: tuple[Saved, ...]
    complaints: tuple[str, ...]
    unfinished: tuple[tuple[int, int], ...]
    damaged: tuple[str, ...] = ()
    """The folders of which there are complaints."""
    newest_generation: int = 0
    """Of all folders."""


def find_checkpoints(run: Storage) -> FoundCheckpoints:
    """Raises OSError if the storage does not answer."""
    there = run.files(FOLDER)
    whole: list[Saved] = []
    complaints: list[str] = []
    unfinished: list[tuple[int, int]] = []
    damaged_folders: list[str] = []
    generations: list[int] = []
    for name in sorted({"/".join(file.split("/")[:2]) for file in there}):
        checkpoint, key = run.at(name), _key(name)
        generations += [key[1]] if key else []
        if f"{name}/{MANIFEST}" not in there:
            is_aside = f"{name}/{ASIDE}" in there
            unfinished += [key] if key and not is_aside else []
            continue
        try:
            manifest = read_manifest(checkpoint)
        except DamagedCheckpoint as error:
            complaints.append(f"{error}: skipped")
            damaged_folders.append(name)
            continue
        damaged = [f for f in manifest.files if there.get(f"{name}/{f.name}") != f.num_bytes]
        if damaged:
            url = checkpoint.at(damaged[0].name).url
            complaints.append(f"{url}: it is missing or cut short: skipped")
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
    found = re.fullmatch(r".*/step-(\d+)-g(\d+)", folder)
    return (int(found[1]), int(found[2])) if found else None
