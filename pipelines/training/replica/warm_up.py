"""Warm-up of a worker: a discarded build and step of a miniature, so that the first real ones are
fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch.distributed import HashStore

from actors.distributed.backends.backend import backend_of, dissolve_groups, init_world
from actors.distributed.meshes import form_groups
from actors.runtime.factory import quick_imports
from actors.runtime.program import Groups
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.regions import Region
from elastic.protocol.votes import Vote
from pipelines.settings import TrainSettings
from pipelines.training.passes.pipeline import torch_pipelining
from pipelines.training.replica.own_changes import OwnChanges
from pipelines.training.replica.replica import ShardedReplica
from pipelines.training.replica.step_flops import ForwardFlops
from pipelines.training.workload.state import initial_value, state_specs
from pipelines.training.workload.workload import Workload

FORMING_TIMEOUT = timedelta(seconds=60)


Build = Callable[..., ShardedReplica]
"""Makes a rank's replica."""


def warm_up(
    workload: Workload,
    settings: TrainSettings,
    device: torch.device,
    build: Build = ShardedReplica,
    counter: ForwardFlops | None = None,
) -> None:
    """Build, adopt, compute, apply and evaluate once with a miniature, and leave nothing behind.

    This runs torch's lazy imports and fills first-call caches. The process must have no groups. It
    must run on the training thread, because some of these caches are per thread. `counter` counts
    the operations of the miniature's first pass. Raises `UserError` for a model that changes its
    own parameters.
    """
    with quick_imports():
        torch_pipelining()
    miniature = workload.miniature()
    microbatch = settings.microbatch if miniature.has_constant_size else 1
    num_microbatches = min(2, settings.num_microbatches)  # a body may need its declared batch
    changes = {"batch": num_microbatches * microbatch, "microbatch": microbatch, "eval_samples": 1}
    small = settings.model_copy(update=changes | {"record_samples": None, "compile": False})
    with group_of_one(device) as groups:
        replica = build(miniature, small, groups)
        if counter is not None:
            counter.watch(replica.sharded.modules[0])
        _one_step(replica, miniature, small, groups)


@contextmanager
def group_of_one(device: torch.device) -> Iterator[Groups]:
    """The groups of a world of one worker, with a store in this process's memory."""
    backend, store = backend_of(device.type), HashStore()
    backend.prepare(store, 1, FORMING_TIMEOUT)
    try:
        init_world(backend, store, 0, 1, FORMING_TIMEOUT)
        assignment = Assignment(0, Layout(), ("alone",))
        yield form_groups(backend, assignment, 0, device, FORMING_TIMEOUT)
    finally:
        dissolve_groups(backend)


def _one_step(
    replica: ShardedReplica, workload: Workload, settings: TrainSettings, groups: Groups
) -> None:
    tensors = {}
    for spec in state_specs(workload, settings):
        value = initial_value(workload, settings, spec, Region.whole(spec.shape))
        tensors[spec.name] = value.to(groups.device)
    replica.adopt(tensors)
    replica.sharded.gather(_never)  # else the step would do so, which changes all parameters
    own_changes = OwnChanges(replica.sharded.modules)
    loss_sum, num_tokens, sq_grad_norm = replica.compute(1, _never).tolist()
    own_changes.refuse()
    replica.apply(1, Vote(1, loss_sum, int(num_tokens), sq_grad_norm, num_contributions=1))
    if workload.num_held_out:
        replica.evaluate(1, _never)


def _never() -> None:
    """The `interrupt` that never raises."""
