"""Memory trial: the bytes of activations of one microbatch, counted without computing anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from actors.distributed.torch_private import FakeTensorMode, TorchDispatchMode, storage_key
from elastic.geometry.training_job import PassMemory
from pipelines.settings import TrainSettings
from pipelines.training.passes.passes import loss_context
from pipelines.training.replica.depth import Measured, measure_depth
from pipelines.training.replica.gpu_memory import KeptAsOnGpu, keep_as_on_gpu
from pipelines.training.sharding.parallelize import parallelize_module
from pipelines.training.sharding.sharded import as_distributed, assign, local_tensor
from pipelines.training.workload.parallel_groups import ALONE, ParallelGroups
from pipelines.training.workload.state import build_on_meta, stored_dtype
from pipelines.training.workload.trees import mapped, tensors_in
from pipelines.training.workload.workload import PADDING, ModuleInputs, Workload

HOST = torch.device("cpu")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, while they live.

    Operations of backward count too. `now` is their sum, and `peak` its maximum. `num_operations`
    are those that made a storage: others are mostly views, which a device does not see.
    """

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        """Storages of `known` tensors do not count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[int, int] = {}
        self.known = {storage_key(local_tensor(tensor)) for tensor in known}
        self.now = self.peak = self.num_operations = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        results = operator(*args, **(kwargs or {}))
        is_new = [self.see(local_tensor(tensor)) for tensor in tensors_in(results)]
        self.num_operations += any(is_new)
        self.measure()
        return results

    def see(self, tensor: Tensor) -> bool:
        """Count the storage of a tensor from now on; returns whether it is new."""
        key = storage_key(tensor)
        if key in self.sizes or key in self.known:
            return False
        storage = tensor.untyped_storage()
        self.sizes[key] = storage.nbytes()
        self.now += self.sizes[key]
        finalize(storage, self._forget, key).atexit = False
        return True

    def measure(self) -> None:
        """Note the bytes after an operation."""
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


PHASES = ("loss", "first", "middle", "end", "last")
"""Forward and loss, then the backward of the last block, of those before it, of the second one, and
of the first with what is before that."""


class _PassBytes(LiveBytes):
    """Also notes the peak of each phase of a pass, with and without the gradients of parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__([*module.parameters(), *module.buffers()])
        self.gradients: dict[int, int] = {}
        self.phase = "loss"
        self.peaks = dict.fromkeys(PHASES, 0)
        self.peaks_without = dict.fromkeys(PHASES, 0)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._take)

    def measure(self) -> None:
        super().measure()
        without = self.now - sum(self.gradients.values())
        self.peaks[self.phase] = max(self.peaks[self.phase], self.now)
        self.peaks_without[self.phase] = max(self.peaks_without[self.phase], without)

    def _take(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        key = storage_key(local_tensor(parameter.grad))
        self.gradients[key] = self.sizes.get(key, 0)


def pass_memory_of(
    workload: Workload, settings: TrainSettings, tp: int = 1, on_gpu: bool = False
) -> PassMemory:
    """The activations of a microbatch of the settings' size under a degree of `tp`, as they are on
    a CPU or on a GPU.

    Runs forward and backward on tensors without values. Raises whatever a module raises that
    cannot run so, such as one that reads a value.
    """
    settings = settings.model_copy(update={"compile": False})
    with _tp_mesh(tp) as mesh:
        seq_len = workload.seq_len
        parallel = ParallelGroups(seq_len, tp=mesh, num_tp=tp) if mesh is not None else ALONE
        seen = measure_depth(
            workload, lambda model: measure_pass(model, settings, parallel, on_gpu)
        )
    of_blocks = max(seen[f"{phase} without"] for phase in ("first", "middle", "end"))
    peak = max(seen[phase] for phase in PHASES)
    return PassMemory(
        tp,
        seen["in blocks"],
        max(0, seen["kept"] - seen["in blocks"]),
        max(0, seen["loss without"] - seen["kept"]),
        max(0, of_blocks - seen["kept"]),
        max(seen["last without"], peak - seen["gradients"], 0),
        seen["operations"],
    )


def measure_pass(
    workload: Workload, settings: TrainSettings, parallel: ParallelGroups, on_gpu: bool
) -> Measured:
    """The bytes that a forward keeps, in blocks and in all, those of gradients, the peaks of each
    phase, and the number of operations."""
    module = build_on_meta(workload, settings, parallel)
    if on_gpu:
        keep_as_on_gpu(workload.blocks(module))
    parallelize_module(module, workload, parallel, settings)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        _give_storages(module, settings)
    fed = workload.feed(workload.empty(settings.microbatch), HOST, parallel, PADDING)
    with loss_context(parallel), KeptAsOnGpu() if on_gpu else nullcontext():
        return _count(workload, module, _without_values(fed, fake), parallel)


def _count(workload: Workload, module: nn.Module, fed: Any, parallel: ParallelGroups) -> Measured:
    blocks = workload.blocks(module)
    live = _PassBytes(module)
    begins, ends = [], []
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_: begins.append(live.now))
        block.register_forward_hook(lambda *_: ends.append(live.now))
        if (phase := _phase_of(number, len(blocks))) is not None:
            block.register_forward_hook(_phase_hook(live, phase))
    with live:
        for tensor in tensors_in(fed):
            live.see(tensor)
        loss = workload.losses(module, fed, parallel).loss
        kept = live.now
        loss.backward()
    return {
        "in blocks": _in_blocks(begins, ends),
        "kept": kept,
        "gradients": sum(live.gradients.values()),
        "operations": live.num_operations,
        **live.peaks,
        **{f"{phase} without": peak for phase, peak in live.peaks_without.items()},
    }


def _phase_of(number: int, num_blocks: int) -> str | None:
    """The phase that begins with the backward of a block."""
    begin = {num_blocks - 2: "middle", 1: "end", num_blocks - 1: "first", 0: "last"}
    return begin.get(number)


def _in_blocks(begins: Sequence[int], ends: Sequence[int]) -> int:
    """What all blocks keep. Where a block ends, some of its temporary tensors are still there, but
    not where the next one begins."""
    if len(begins) < 2:
        return sum(ends) - sum(begins)
    return (begins[-1] - begins[0]) * len(begins) // (len(begins) - 1)


def _phase_hook(live: _PassBytes, phase: str) -> Any:
    """A forward hook by which a phase begins when backward reaches a block's output."""

    def begin(gradient: Tensor) -> None:
        live.phase = phase

    def hook(block: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(begin)

    return hook


def _without_values(fed: Any, fake: FakeTensorMode) -> Any:
    """A microbatch on the device; what stays on the host keeps its values, as modules read them."""
    if isinstance(fed, ModuleInputs):
        inputs, targets = fake.from_tensor(fed.inputs), fake.from_tensor(fed.targets)
        return ModuleInputs(inputs, fed.keywords, targets)
    return mapped(fake.from_tensor, fed)


def _give_storages(module: nn.Module, settings: TrainSettings) -> None:
    """Give parameters and buffers on the meta device a storage in a fake mode."""
    half = torch.bfloat16 if settings.dtype == "bfloat16" else stored_dtype(settings)
    trained = {name: p.requires_grad for name, p in module.named_parameters()}
    values = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        local = local_tensor(tensor)
        dtype = half if name in trained else local.dtype
        value = as_distributed(torch.empty(local.shape, dtype=dtype, device=HOST), tensor)
        values[name] = value
        if name in trained:
            values[name] = nn.Parameter(value, requires_grad=trained[name])
    assign([module], values)


@contextmanager
def _tp_mesh(tp: int) -> Iterator[DeviceMesh | None]:
    """A mesh of `tp` ranks of which only this one exists: its collectives do nothing."""
    if tp == 1:
        yield None
        return
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=tp)
    try:
        yield DeviceMesh("cpu", torch.arange(tp), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()
