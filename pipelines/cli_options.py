"""Options and arguments that commands of `elastic` share."""

from __future__ import annotations

from typing import Annotated

import typer

Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. optimizer.lr=1e-3."),
]

FaultOptions = Annotated[
    list[str] | None,
    typer.Option(metavar="SENTENCE", help="Inject a fault, e.g. 'kill worker 3 at step 60'."),
]
RecipeName = Annotated[
    str,
    typer.Argument(
        help="tiny | tiny_moe | byte_lm | mlp | finetune | hf:FOLDER | file.py | "
        "file.py:function | module:function"
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Training data: a folder, file or glob of text (.txt, .jsonl, .parquet, .arrow), "
        "token shards (a folder or a URL such as s3://bucket/folder), or 'random'."
    ),
]
Workers = Annotated[
    str | None,
    typer.Option(metavar="MIN:MAX", help="Number of workers, e.g. 2:8; 8 alone means 1:8."),
]
Interface = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Network interface of the workers. Default: that on the route to the Ray head.",
    ),
]
Ports = Annotated[
    str | None,
    typer.Option(
        metavar="FIRST:LAST",
        help="Ports of the store, snapshot servers and link servers, e.g. 20000:20100.",
    ),
]
NotifyUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar="ELASTIC_NOTIFY",
        show_envvar=True,
        help="POST a JSON object to this URL when the run has been waiting for long (setting "
        "notify_after_s) and when it stops.",
    ),
]
Callbacks = Annotated[
    list[str] | None,
    typer.Option(
        "--callback",
        metavar="FILE.py:NAME",
        help="Call this pipelines.callbacks.Callback for each step, reshard, notice and checkpoint."
        " Also module:NAME. Repeatable.",
    ),
]
TrackingUri = Annotated[
    str | None, typer.Option(help="MLflow server or store. Default: a file in the storage.")
]
AuditEvery = Annotated[
    int | None,
    typer.Option(metavar="N", help="Compare the replicas bit by bit every N steps."),
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Start the run on the cluster and return immediately.")
]
Profile = Annotated[
    str | None,
    typer.Option(
        metavar="steps=FIRST:LAST",
        help="Save a torch.profiler trace of these steps from each worker, e.g. steps=10:13.",
    ),
]
InProcess = Annotated[
    bool,
    typer.Option("--in-process", help="One worker in this process, without Ray: for debuggers."),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print steps, data, layouts and memory; start nothing."),
]
ScriptWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- ARGUMENTS",
        help="Arguments of file.py, its sys.argv in each process, e.g. -- --lr 3e-4.",
    ),
]

Prices = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[TYPE=]NUMBER",
        help="Price of a worker-hour, optionally for one node type or device. Repeatable.",
    ),
]
