"""torchrun with restarts: DDP on Gloo, a checkpoint on tmpfs every 10 steps.

    torchrun --standalone --nproc-per-node 4 --max-restarts 99 --monitor-interval 0.1 \
        torchrun_mlp.py FOLDER PORT [PORT ...]

Each attempt has its own store on the next of the given ports. With the agent's store, which
outlives attempts, every restart would fail: Gloo finds the addresses of dead processes there.
"""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from mlp import CHECKPOINT_EVERY, MAX_GRAD_NORM, StepLog, loss_of, make_model, make_optimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_


def main(folder: Path, ports: list[str]) -> None:
    torch.set_num_threads(1)
    world_rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    step_log = StepLog(folder, world_rank)
    port = int(ports[int(os.environ["TORCHELASTIC_RESTART_COUNT"])])
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=world_rank == 0)
    dist.init_process_group("gloo", store=store, rank=world_rank, world_size=world_size)
    model = make_model()
    optimizer = make_optimizer(model)
    checkpoint = folder / "checkpoint.pt"
    begin = 1
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["step"] + 1
    replica = DistributedDataParallel(model)
    for step in count(begin):
        loss_of(replica, step, world_rank, world_size).backward()
        clip_grad_norm_(replica.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if world_rank == 0:
            step_log.commit(step, world_size)
        if step % CHECKPOINT_EVERY == 0 and world_rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, folder / "partial.pt")
            (folder / "partial.pt").replace(checkpoint)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
