"""Datasets of other libraries that divide their samples among ranks of their own: refused."""

from __future__ import annotations

from pipelines.errors import UserError

INSTEAD = {
    "webdataset": "deals tar files to processes by their rank, which changes during a run, and "
    "shuffles by the process: use TarDataset(urls, transform=...) of pipelines.custom_data, which "
    "reads the same files by index",
    "streaming.base": "deals shards to processes by their rank, which changes during a run: use "
    "MdsDataset(folder, transform=...) of pipelines.custom_data, which reads the same shards by "
    "index",
}
"""By the module of a class, and of its subclasses."""
KINDS = {"DataPipeline", "WebDataset", "WebLoader", "StreamingDataLoader", "StreamingDataset"}
"""The names of these classes: a user's own module may have the name of a library."""


def refuse_foreign(item: object) -> None:
    """Raise `UserError` for a dataset or loader of such a library, or one that holds it as an
    attribute. The libraries need not be installed."""
    for held in (item, *getattr(item, "__dict__", {}).values()):
        for kind in type(held).__mro__:
            for module, what in INSTEAD.items():
                if kind.__name__ in KINDS and f"{kind.__module__}.".startswith(f"{module}."):
                    raise UserError(f"{type(held).__name__} of {module.partition('.')[0]} {what}")
