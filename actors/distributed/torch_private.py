"""All uses of torch's private names for tensors and modules, each with the reason why the public
API does not suffice; `backends/torch_groups_private.py` has those for process groups."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils.data._utils import worker as data_worker

# `TorchDispatchMode` is documented, but public only under this module: no other hook sees every
# operation of a constructor. `FakeTensorMode` makes tensors without values that have a device: on
# the meta device an operation may run another kernel, which keeps other tensors.


def all_threads() -> Any:
    """The option that makes torch.profiler trace all threads; the public API has none.

    By default it traces the calling thread alone. But a custom training loop runs in another
    thread, and another thread may end the trace.
    """
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


Tensors = list[Tensor] | tuple[Tensor, ...]


def scale_tensors(tensors: Tensors, factor: float) -> None:
    """Multiply all tensors in place, in a few kernels.

    The public operations run one kernel for each tensor.
    """
    if tensors:
        torch._foreach_mul_(tensors, factor)


def copy_tensors(targets: Tensors, sources: Tensors) -> None:
    """Copy each source into its target, in a few kernels; see `scale_tensors`."""
    torch._foreach_copy_(targets, sources)


def norms_of(tensors: Tensors) -> Tensors:
    """The 2-norm of each tensor, in a few kernels.

    The public `torch.nn.utils.get_total_norm` returns only the norm of all.
    """
    return torch._foreach_norm(tensors)


def is_view(tensor: Tensor) -> bool:
    """Whether a tensor is a view of another, so that autograd does not detach it in place.

    No public function says so.
    """
    return tensor._is_view()


def sum_unsharded_gradients(module: Any) -> None:
    """Add a module's unsharded gradients to FSDP's sums in the dtype of the reduction.

    FSDP does so in its own hook, which a backward pass of weights alone does not call.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # another version of torch
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    for group in groups:
        if hasattr(group, "_set_unsharded_grad_dtypes"):  # torch 2.15
            group._set_unsharded_grad_dtypes(defer_upcast=False)
        else:
            _accumulate_gradients(group)


def widen_gradient(parameter: Tensor, dtype: torch.dtype) -> None:
    """Let autograd keep a parameter's gradient in a wider dtype, where FSDP does so too.

    From torch 2.15 on FSDP does, so that a bfloat16 parameter's gradient is not rounded where an
    operation computes it in float32, as that of RMSNorm does. No public name says so.
    """
    # Imported here, since reader processes import this file, and FSDP takes them a second.
    fsdp = import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    if parameter.requires_grad and hasattr(fsdp.FSDPParamGroup, "_set_unsharded_grad_dtypes"):
        parameter.grad_dtype = dtype


def _accumulate_gradients(group: Any) -> None:
    for parameter in group.fsdp_params:
        if parameter.unsharded_accumulated_grad is None:
            parameter.to_accumulated_grad_if_needed()
        else:
            parameter.accumulate_unsharded_grad_if_needed()


def num_changes(tensor: Tensor) -> int:
    """How often a tensor or a view of it has been changed in place.

    Autograd counts this to refuse a changed tensor in backward; no public function returns it.
    """
    return tensor._version


def has_gradient_hook(parameter: Tensor) -> bool:
    """Whether a function is registered that is called with the parameter's gradient.

    No public function says so.
    """
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def has_step_hook(optimizer: Optimizer) -> bool:
    """Whether a function is registered that is called before or after the optimizer's step.

    No public function says so.
    """
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def detached_in_mode(tensor: Tensor) -> Tensor:
    """A detached view that shares the tensor's number of changes, in a dispatch mode too.

    Under a mode the public `detach` starts a new count.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def storage_key(tensor: Tensor) -> int:
    """The identity of a tensor's storage.

    `data_ptr()` is 0 for every storage on the meta device.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


TO_COPY = torch.ops.aten._to_copy.default
"""The operation to which `Tensor.to` dispatches; it has no public name."""


FUSED_PRODUCTS = tuple(
    getattr(torch.ops.aten, name).default
    for name in (
        "_grouped_mm",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(torch.ops.aten, name)
)
"""The operations to which `grouped_mm` and `scaled_dot_product_attention` dispatch if they have a
kernel; they have no public names, and which of them there are depends on the version."""


def dropout_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The dropout probability of a call of an operation, 0 if it has none.

    Its place among the arguments is only in the operation's schema, which has no public name.
    """
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            value = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return float(value)
    return 0.0


def replace_truncated_normal(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let `torch.nn.init.trunc_normal_` fill tensors by this function; returns the one before.

    `trunc_normal_` looks it up here. Replacing `trunc_normal_` itself would miss modules that have
    imported it by name.
    """
    before: Callable[..., Tensor] = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = fill
    return before


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention by the device's flash kernel, and the log-sum-exp of each query's scores.

    `scaled_dot_product_attention` does not return the latter, and without it the attention to
    several blocks of keys cannot be merged. `query` is (batch, heads, queries, head_dim), the
    log-sum-exp (batch, heads, queries), in float32 or better; `key` and `value` may have fewer
    heads. With `is_causal` there must be as many keys as queries.
    """
    if query.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    else:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
    output, log_sum_exp = kernel(query, key, value, 0.0, is_causal)[:2]
    return output, log_sum_exp


def flash_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value of `flash_attention`, for which there is no public
    function.

    `output` and `log_sum_exp` may be those of attention to more keys, of which these are a block:
    then the gradients are the summands of this block.
    """
    # The kernels read along the last dim; the gradient of a sum, for example, has stride 0.
    gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    if query.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        heads = (gradient, query, key, value, output)
        on_cpu: tuple[Tensor, Tensor, Tensor] = kernel(*heads, log_sum_exp, 0.0, is_causal)
        return on_cpu
    # The kernel reads the state of the random generator only with dropout.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    gradients: tuple[Tensor, Tensor, Tensor] = kernel(
        gradient,
        query,
        key,
        value,
        output,
        log_sum_exp.contiguous(),
        *(None, None),  # no sequences of various lengths
        *(query.shape[2], key.shape[2]),
        0.0,
        is_causal,
        state,
        query.new_empty(0),
    )
    return gradients


def direct_parameters(module: nn.Module) -> dict[str, Tensor | None]:
    """The table of a module's own parameters, to be changed in place.

    The public setters refuse a plain tensor in the place of a parameter.
    """
    table: dict[str, Any] = module._parameters
    return table


def direct_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The table of a module's own buffers, to be changed in place.

    `setattr` takes several times as long, for each buffer of each pass.
    """
    return module._buffers


MODULE_TABLES = {"_buffers", "_modules", "_parameters"}
"""The tables of a module in which everything with values is found; no public name reaches all."""


def transient_buffers(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that are not in its `state_dict`.

    `state_dict()` would copy the names of all modules below, too.
    """
    return module._non_persistent_buffers_set


def announce_reader(number: int, num_readers: int, dataset: Any) -> None:
    """Make `torch.utils.data.get_worker_info()` return this process' number; the public API sets it
    only in processes that a `DataLoader` starts."""
    data_worker._worker_info = data_worker.WorkerInfo(
        id=number, num_workers=num_readers, seed=number, dataset=dataset
    )


def without_tensor_subclasses() -> AbstractContextManager[None]:
    """A context in which tensors of a subclass, such as parameters, behave as plain ones."""
    return torch._C.DisableTorchFunctionSubclass()


def is_recomputed() -> bool:
    """Whether a forward pass runs in a region of `torch.utils.checkpoint`, whose results backward
    computes again: outside of the modes of the forward pass."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None or not torch.is_grad_enabled()
