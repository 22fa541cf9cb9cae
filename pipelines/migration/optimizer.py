"""The optimizer of a DeepSpeed configuration, as settings or as the call of a loop."""

from __future__ import annotations

from typing import Any

from pipelines.migration.configuration import AUTO, Configuration
from pipelines.migration.conversion import Conversion

TYPE = "optimizer.type"
PARAMS = "optimizer.params"
ADAMS = ("adam", "adamw")
LR, EPS = 1e-3, 1e-8
BETAS = (0.9, 0.999)
TORCH_WEIGHT_DECAY = 0.01
"""The default of torch's AdamW; that of DeepSpeed's is 0."""
TORCH_OPTIMIZERS = ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD")
"""Optimizers that DeepSpeed takes from torch and whose update of an element needs no others."""
NO_COUNTERPART = {
    "onebitadam": "1-bit communication; AdamW computes the same update without it",
    "zerooneadam": "0/1 communication; AdamW computes the same update without it",
    "onebitlamb": "LAMB needs the norms of whole parameters",
    "lamb": "LAMB needs the norms of whole parameters",
    "lion": "torch has no Lion; give the loop an optimizer class of your own",
    "muon": "prepare torch.optim.Muon and AdamW together, as docs/imperative.md does",
}
DROPPED = {
    "torch_adam": "not needed because the optimizer is torch's",
    "fused": "not needed because the run chooses the kernel",
    "foreach": "not needed because the run chooses the kernel",
    "capturable": "not needed because no CUDA graph is captured",
    "fp32_optimizer_states": "not needed because optimizer state is float32",
    "cuda_aware": "not needed because it is about 1-bit communication",
    "comm_backend_name": "not needed because it is about 1-bit communication",
    "freeze_step": "not needed because it is about 1-bit communication",
}


def convert_optimizer(keys: Configuration, conversion: Conversion) -> None:
    """Add the optimizer, if the configuration has one; otherwise the script makes it."""
    name = keys.text(TYPE)
    if name is None:
        return
    if name.lower() in ADAMS:
        _convert_adam(keys, conversion, name.lower() == "adamw")
    elif conversion.is_loop and name in TORCH_OPTIMIZERS:
        arguments = {
            key.removeprefix(f"{PARAMS}."): keys.values[key]
            for key in keys.below(PARAMS)
            if keys.has(key)
        }
        conversion.peak = keys.number(f"{PARAMS}.lr")
        conversion.optimizer, conversion.optimizer_arguments = name, arguments
        for key in (TYPE, *keys.below(PARAMS)):
            keys.report(key, f"make_optimizer: torch.optim.{name}")
    else:
        other = "only AdamW has settings; a loop (--to loop) may use any optimizer"
        keys.report(TYPE, f"no counterpart: {NO_COUNTERPART.get(name.lower(), other)}")
        conversion.peak = keys.number(f"{PARAMS}.lr")
        for key in keys.below(PARAMS):
            keys.report(key, f"no counterpart: an argument of {name}")


def _convert_adam(keys: Configuration, conversion: Conversion, is_named_adamw: bool) -> None:
    """DeepSpeed's `Adam` is AdamW unless `adam_w_mode` is false."""
    mode = f"{PARAMS}.adam_w_mode"
    is_decoupled = is_named_adamw or not keys.has(mode) or keys.flag(mode)
    is_torch = keys.flag(f"{PARAMS}.torch_adam")
    decay = keys.number(f"{PARAMS}.weight_decay")
    if decay is None:
        decay = TORCH_WEIGHT_DECAY if is_torch and is_decoupled else 0.0
    lr, eps = keys.number(f"{PARAMS}.lr"), keys.number(f"{PARAMS}.eps")
    conversion.peak = LR if lr is None else lr
    values: dict[str, Any] = {
        "lr": conversion.peak,
        "betas": _betas(keys),
        "eps": EPS if eps is None else eps,
        "weight_decay": decay,
    }
    if keys.values.get(f"{PARAMS}.lr") == AUTO:
        conversion.peak = None
    values = {key: v for key, v in values.items() if keys.values.get(f"{PARAMS}.{key}") != AUTO}
    name = "AdamW" if is_decoupled else "Adam"
    if conversion.is_loop:
        conversion.optimizer, conversion.optimizer_arguments = name, values
        for key in values:
            keys.report(f"{PARAMS}.{key}", f"make_optimizer: {key}={values[key]}")
        keys.report(TYPE, f"make_optimizer: torch.optim.{name}")
    else:
        _add_settings(keys, conversion, values, is_decoupled)
    keys.report(mode, f"{name} with {'decoupled weight decay' if is_decoupled else 'L2'}")
    for key in ("bias_correction", "amsgrad"):
        is_default = keys.flag(f"{PARAMS}.{key}") == (key == "bias_correction")
        line = "not needed because it is the default" if is_default else "no counterpart"
        keys.report(f"{PARAMS}.{key}", f"{line}: updates with bias correction, without AMSGrad")
    for key, line in DROPPED.items():
        keys.report(f"{PARAMS}.{key}", line)


def _add_settings(
    keys: Configuration, conversion: Conversion, values: dict[str, Any], is_decoupled: bool
) -> None:
    for key, value in values.items():
        if key == "betas":
            changes = dict(zip(("optimizer.beta1", "optimizer.beta2"), value, strict=True))
        else:
            changes = {f"optimizer.{key}": value}
        conversion.settings |= changes
        line = ", ".join(f"{name}={number}" for name, number in changes.items())
        if key == "weight_decay" and value:
            line += ", for matrices only"
            line += "" if is_decoupled else " and decoupled; there is no counterpart of L2"
        keys.report(f"{PARAMS}.{key}", line)
    keys.report(TYPE, "the optimizer of the settings is AdamW")


def _betas(keys: Configuration) -> tuple[float, float]:
    key = f"{PARAMS}.betas"
    if not keys.has(key):
        return BETAS
    value = keys.values[key]
    if not isinstance(value, list) or len(value) != 2:
        raise keys.mistake(key, "must be a list of two numbers")
    if not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in value):
        raise keys.mistake(key, "must be numbers from 0 to 1, 1 excluded")
    return float(value[0]), float(value[1])
