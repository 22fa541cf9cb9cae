"""How much of a run its tracking store has got: `tracking.json` in the run's folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from uuid import uuid4

from actors.storage.credentials import without_credentials
from actors.storage.storage import Storage
from pipelines.observe.history.run_folder import TRACKING, damaged_file, read_json


@dataclass(slots=True)
class Delivered:
    """Progress with one store; each number moves only after the store has said yes.

    `key` is a tag by which the run is found again if the answer to its creation was lost.
    `metrics_offset`, `system_offset` and `statistics_offset` are bytes of those files,
    `num_happenings` counts what the journal tells, `num_readings` those of where the time has
    gone; `profiles` are the names of the traces that it has.
    """

    uri: str
    experiment: str
    key: str
    run_id: str | None = None
    metrics_offset: int = 0
    system_offset: int = 0
    num_run_events: int = 0
    num_readings: int = 0
    profiles: list[str] = field(default_factory=list)
    statistics_offset: int = 0

    @classmethod
    def load(cls, files: Storage, uri: str, experiment: str) -> Delivered:
        """Go on where an earlier process left off; another store or experiment begins anew."""
        uri = without_credentials(uri)
        told = read_json(files, TRACKING)
        if told is not None:
            try:
                found = cls(**told)
            except TypeError:
                raise damaged_file(files, TRACKING) from None
            if (found.uri, found.experiment) == (uri, experiment):
                return found
        return cls(uri, experiment, key=uuid4().hex)

    def save(self, files: Storage) -> None:
        """Replace the file in one go: it is whole, or the one before."""
        files.write(TRACKING, json.dumps(asdict(self), indent=1).encode())

    def successor(self) -> Delivered:
        """For when the run is gone from the store: everything again, to a run of the next key."""
        stem, _, number = self.key.partition("-")
        return Delivered(self.uri, self.experiment, key=f"{stem}-{int(number or 1) + 1}")
