"""The private names of torch that this project uses, and whether the installed torch has them.

A new version of torch may drop a private name. Without this check a run would fail at the first use
of the name, which may be its first reshard after weeks.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from actors.storage.errors import UnsuitableMachine

PROVEN = ("2.13.0",)
"""The versions of torch with which the tests pass; see `make test-torch`."""

NAMES: dict[str, tuple[str, ...]] = {
    "torch": ("_foreach_copy_", "_foreach_mul_", "_foreach_norm"),
    "torch.Tensor": ("_backward_hooks", "_is_view", "_post_accumulate_grad_hooks", "_version"),
    "torch.UntypedStorage": ("_cdata",),
    "torch._C": ("_SetExcludeDispatchKeyGuard", "_distributed_c10d"),
    "torch._C._autograd": ("_top_saved_tensors_default_hooks",),
    "torch._C.DispatchKey": ("ADInplaceOrView",),
    "torch._C._profiler": ("_ExperimentalConfig",),
    "torch.nn.init": ("_no_grad_trunc_normal_",),
    "torch.ops.aten": (
        "_to_copy",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "torch.ops.aten._to_copy.default": ("_schema",),
    "torch._subclasses.fake_tensor": ("FakeTensorMode",),
    "torch.utils._python_dispatch": ("TorchDispatchMode",),
    "torch.utils.data._utils.worker": ("WorkerInfo", "_worker_info"),
    "torch.distributed.fsdp.FSDPModule": ("_get_fsdp_state",),
    "torch.distributed.ProcessGroup": (
        "_end_coalescing",
        "_register_backend",
        "_set_default_backend",
        "_set_group_desc",
        "_start_coalescing",
    ),
    "torch.distributed.ProcessGroupGloo": ("_Options",),
    "torch.distributed.ProcessGroupGloo._Options": ("_devices", "_threads", "_timeout"),
    "torch.distributed.distributed_c10d": (
        "_unregister_all_process_groups",
        "_update_default_pg",
    ),
    "torch.distributed.distributed_c10d._world": (
        "group_count",
        "pg_backend_config",
        "pg_coalesce_state",
        "pg_group_ranks",
        "pg_map",
        "pg_names",
        "pg_to_tag",
        "tags_to_pg",
    ),
    "torch.distributed.tensor.DTensor": ("_op_dispatcher",),
}
"""The names by the object that has them."""

FSDP = "torch.distributed.fsdp._fully_shard"
ALTERNATIVES = (
    (
        f"{FSDP}._fsdp_param.FSDPParam.accumulate_unsharded_grad_if_needed",
        f"{FSDP}._fsdp_param_group.FSDPParamGroup._set_unsharded_grad_dtypes",
    ),
    (
        f"{FSDP}._fsdp_param.FSDPParam.to_accumulated_grad_if_needed",
        f"{FSDP}._fsdp_param_group.FSDPParamGroup._set_unsharded_grad_dtypes",
    ),
)
"""Each row has the names of one thing in various versions of torch."""

NCCL_NAMES = {"torch.distributed.ProcessGroupNCCL.Options": ("_timeout", "config")}
"""In builds of torch with NCCL only."""

MODULE_NAMES = ("_buffers", "_modules", "_non_persistent_buffers_set", "_parameters")
"""Attributes of every module, which its constructor sets."""

OPTIMIZER_NAMES = ("_optimizer_step_post_hooks", "_optimizer_step_pre_hooks")
"""Attributes of every optimizer, which its constructor sets."""


def missing_names() -> list[str]:
    """The private names that the installed torch lacks."""
    names = NAMES | (NCCL_NAMES if dist.is_nccl_available() else {})
    missing = [
        f"{owner}.{name}" for owner, members in names.items() for name in _missing(owner, members)
    ]
    missing += [" or ".join(row) for row in ALTERNATIVES if all(map(_is_missing, row))]
    module, optimizer = torch.nn.Module(), torch.optim.SGD([torch.empty(0)])
    missing += [f"torch.nn.Module().{n}" for n in MODULE_NAMES if not hasattr(module, n)]
    missing += [f"torch.optim.SGD().{n}" for n in OPTIMIZER_NAMES if not hasattr(optimizer, n)]
    return missing


def refuse_unknown_torch() -> None:
    """Raises `UnsuitableMachine` if the installed torch lacks a name that this project uses."""
    if missing := missing_names():
        versions = ", ".join(PROVEN)
        raise UnsuitableMachine(
            f"torch {torch.__version__} has no {', '.join(missing)}, which this project uses: "
            f"install torch=={PROVEN[-1]} (proven: {versions})"
        )


def _missing(owner: str, names: tuple[str, ...]) -> list[str]:
    try:
        found = _resolve(owner)
    except (AttributeError, ImportError):
        return list(names)
    return [name for name in names if not hasattr(found, name)]


def _is_missing(path: str) -> bool:
    owner, _, name = path.rpartition(".")
    return bool(_missing(owner, (name,)))


def _resolve(path: str) -> Any:
    """The object with this dotted name; a submodule is imported if its package has not done so."""
    first, *rest = path.split(".")
    found: Any = import_module(first)
    for name in rest:
        if isinstance(found, ModuleType) and not hasattr(found, name):
            import_module(f"{found.__name__}.{name}")
        found = getattr(found, name)
    return found
