"""Where checkpoints lie, when one is whole, and how it is made visible and removed."""

from __future__ import annotations

import json
import queue
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from actors.errors import DamagedCheckpoint, LeaseLost
from actors.lease import Lease
from actors.storage import Storage
from elastic.commands import DropCheckpoints, PublishCheckpoint, SetAside
from elastic.events import Checkpointed, Event, PartFailed, PartFile, Saved

FOLDER = "checkpoints"
MANIFEST, ASIDE = "manifest.json", "manifest.damaged.json"
FORMAT_VERSION = 2


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    step: int
    generation: int
    files: tuple[PartFile, ...]


def folder_of(step: int, generation: int) -> str:
    """A folder of its own for each try: a redone step never meets the files of the first."""
    return f"{FOLDER}/step-{step:08d}-g{generation}"


def read_manifest(checkpoint: Storage) -> Manifest:
    """Raises `DamagedCheckpoint` if there is none that can be read, or of another format."""
    place = checkpoint.at(MANIFEST).url
    try:
        fields = json.loads(checkpoint.read(MANIFEST))
        version = fields["format_version"]
        if version != FORMAT_VERSION:
            raise DamagedCheckpoint(
                f"{place}: format_version {version}, and this reads {FORMAT_VERSION}"
            )
        files = (PartFile(name, **told) for name, told in fields["files"].items())
        return Manifest(fields["step"], fields["generation"], tuple(files))
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{place}: it is not there") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{place}: it is no manifest ({error})") from None


def publish(run: Storage, step: int, generation: int, files: Iterable[PartFile]) -> str:
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
        "files": {f.name: {"num_bytes": f.num_bytes, "checksum": f.checksum} for f in files},
    }
    checkpoint.write(MANIFEST, json.dumps(manifest, indent=1).encode())
    return checkpoint.url


@dataclass(frozen=True)
class Found:
    """What lies in storage when a run is opened.

    `whole` are the checkpoints whose parts are all there in their full size, the oldest first (what
    the parts contain is checked when they are read); `complaints` tell of others that have been
    published; `unfinished` never were (step, generation).
    """

    whole: tuple[Saved, ...]
    complaints: tuple[str, ...]
    unfinished: tuple[tuple[int, int], ...]


def find_checkpoints(run: Storage) -> Found:
    """Raises OSError if the storage does not answer."""
    there = run.files(FOLDER)
    whole: list[Saved] = []
    complaints: list[str] = []
    unfinished: list[tuple[int, int]] = []
    for name in sorted({"/".join(file.split("/")[:2]) for file in there}):
        checkpoint, key = run.at(name), _key(name)
        if f"{name}/{MANIFEST}" not in there:
            is_aside = f"{name}/{ASIDE}" in there
            unfinished += [key] if key and not is_aside else []
            continue
        try:
            manifest = read_manifest(checkpoint)
        except DamagedCheckpoint as error:
            complaints.append(f"{error}: skipped")
            continue
        damaged = [f for f in manifest.files if there.get(f"{name}/{f.name}") != f.num_bytes]
        if damaged:
            url = checkpoint.at(damaged[0].name).url
            complaints.append(f"{url}: it is missing or cut short: skipped")
        else:
            whole.append(Saved(manifest.step, manifest.generation, checkpoint.url))
    whole.sort(key=lambda saved: (saved.step, saved.generation))
    return Found(tuple(whole), tuple(complaints), tuple(unfinished))


def _key(folder: str) -> tuple[int, int] | None:
    found = re.fullmatch(r".*/step-(\d+)-g(\d+)", folder)
    return (int(found[1]), int(found[2])) if found else None


StorageOrder = PublishCheckpoint | DropCheckpoints | SetAside


class Publisher:
    """Publishes and removes in a thread of its own: the controller never waits for storage."""

    def __init__(self, run: Storage, lease: Lease, post: Callable[[Event], None]) -> None:
        self._run = run
        self._lease = lease
        self._post = post
        self._orders: queue.SimpleQueue[StorageOrder | None]
        self._orders = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="publisher", daemon=True)
        self._thread.start()

    def order(self, command: StorageOrder) -> None:
        self._orders.put(command)

    def close(self) -> None:
        """What has been ordered is still done."""
        self._orders.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._lease.look()
                match order:
                    case PublishCheckpoint():
                        self._publish(order)
                    case DropCheckpoints():
                        self._drop(order)
                    case SetAside():
                        self._set_aside(order)
            except LeaseLost:
                return  # the shell sees the same, and ends
            except OSError as error:
                self._fail(order, error)

    def _publish(self, order: PublishCheckpoint) -> None:
        url = publish(self._run, order.step, order.generation, order.files)
        self._post(Checkpointed(order.step, order.generation, url))

    def _drop(self, order: DropCheckpoints) -> None:
        """First the manifest: what is removed half is invisible."""
        for key in order.dropped:
            self._run.remove(f"{folder_of(*key)}/{MANIFEST}")
            self._run.remove(folder_of(*key))

    def _set_aside(self, order: SetAside) -> None:
        checkpoint = self._run.at(folder_of(order.step, order.generation))
        checkpoint.write(ASIDE, checkpoint.read(MANIFEST))
        checkpoint.remove(MANIFEST)

    def _fail(self, order: StorageOrder, error: OSError) -> None:
        """What could not be removed, or set aside, is found when the run is opened again."""
        if isinstance(order, PublishCheckpoint):
            self._post(PartFailed("", order.generation, order.step, str(error)))
