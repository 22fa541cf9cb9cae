"""`tracking.json` in a run's folder: how much of the run its tracking store has."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from uuid import uuid4

from actors.storage.credentials import without_credentials
from actors.storage.storage import Storage
from pipelines.observe.history.run_folder import TRACKING, damaged_file, read_json


@dataclass(slots=True)
class Delivered:
    """Delivery progress for one store; each number advances only after the store has confirmed.

    `key` is a tag that identifies the MLflow run if the answer to its creation was lost.
    `metrics_offset`, `system_offset` and `statistics_offset` are bytes of those files.
    `num_run_events` counts events of the journal, `num_readings` readings of the time account;
    `profiles` are the names of the delivered traces.
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
        """The stored progress; another store or experiment starts from zero."""
        uri = without_credentials(uri)
        fields = read_json(files, TRACKING)
        if fields is not None:
            try:
                stored = cls(**fields)
            except TypeError:
                raise damaged_file(files, TRACKING) from None
            if (stored.uri, stored.experiment) == (uri, experiment):
                return stored
        return cls(uri, experiment, key=uuid4().hex)

    def save(self, files: Storage) -> None:
        """Replace the file atomically."""
        files.write(TRACKING, json.dumps(asdict(self), indent=1).encode())

    def successor(self) -> Delivered:
        """Progress from zero under the next key, for a run that was deleted from the store."""
        stem, _, number = self.key.partition("-")
        return Delivered(self.uri, self.experiment, key=f"{stem}-{int(number or 1) + 1}")
