"""torchft: 4 replicas of one process, a lighthouse, and a supervisor that replaces dead processes.

    python torchft_mlp.py FOLDER

The lighthouse's timeouts are as short as possible here: 0.1 s to join, 0.3 s for heartbeats.
"""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchft
from mlp import MAX_GRAD_NORM, StepLog, loss_of, make_model, make_optimizer
from torch.nn.utils import clip_grad_norm_
from torchft.coordination import LighthouseServer

NUM_REPLICAS = 4
HOST = "127.0.0.1"


def train(folder: Path, replica: int, lighthouse: str) -> None:
    torch.set_num_threads(1)
    step_log = StepLog(folder, replica)
    model = make_model()
    inner = make_optimizer(model)

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2,
        timeout=timedelta(seconds=5),
        rank=0,
        world_size=1,
        store_addr=HOST,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{replica}",
        hostname=HOST,
    )
    wrapped = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, inner)
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        loss_of(wrapped, before + 1, replica, NUM_REPLICAS).backward()
        clip_grad_norm_(wrapped.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        num_participants = manager.num_participants()
        if manager.current_step() > before and manager.participating_rank() == 0:
            step_log.commit(manager.current_step(), num_participants, attempt=num_participants)


def supervise(folder: Path) -> None:
    lighthouse = LighthouseServer(
        bind=f"{HOST}:0",
        min_replicas=2,
        join_timeout_ms=100,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=300,
    )
    address = f"http://{HOST}:{lighthouse.address().rsplit(':', 1)[1]}"

    def start(replica: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, __file__, str(folder), str(replica), address])

    replicas = [start(replica) for replica in range(NUM_REPLICAS)]
    while True:
        time.sleep(0.1)
        for replica, process in enumerate(replicas):
            if process.poll() is not None:
                replicas[replica] = start(replica)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        supervise(Path(sys.argv[1]))
    else:
        train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
