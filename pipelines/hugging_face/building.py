"""Causal language models of `transformers` from their config: shapes on the meta device, and the
values that `transformers` gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipelines.data.transformers_library import library
from pipelines.settings.errors import UserError
from pipelines.settings.home import expanded

CPU = torch.device("cpu")
NOT_HERE = ("auto_map", "quantization_config")
"""Fields of a config that ask for code of the model's own, or for quantised weights."""


def config_of_model(fields: dict[str, Any]) -> Any:
    """The config object of a `config.json`.

    Raises `UserError` for a model that the installed `transformers` cannot build from it.
    """
    transformers, kind = library(), fields.get("model_type")
    told = f"model.config: model_type={kind}"
    if kind not in transformers.CONFIG_MAPPING:
        version = transformers.__version__
        raise UserError(f"{told} is none that transformers {version} knows")
    unfit = [name for name in NOT_HERE if fields.get(name)]
    if unfit:
        raise UserError(f"{told} has {' and '.join(unfit)}, which cannot be trained here")
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(fields)))
    except Exception as error:  # of whatever kind its own checks raise
        raise UserError(f"{told}: {_one_line(error)}") from None
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{told} is no causal language model of transformers")
    if getattr(config, "output_router_logits", False):
        raise UserError(
            f"{told}: the balance loss of its router is not computed; "
            "--set model.config.output_router_logits=false"
        )
    return config


def build(fields: dict[str, Any]) -> nn.Module:
    """The model on the meta device, but for its buffers that are no state: those have their
    values, on the host. Raises `UserError`."""
    transformers, config = library(), config_of_model(fields)
    # Its grouped kernel is not in every dtype, and has been wrong where an expert has no rows.
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, **options)
    except (ValueError, TypeError, AttributeError, KeyError, ImportError) as error:
        kind = fields["model_type"]
        raise UserError(f"model.config: model_type={kind}: {_one_line(error)}") from None
    model.config.use_cache = False
    _fill_buffers(model)
    return model


def draw_tensor(model: nn.Module, name: str, seed: int) -> Tensor:
    """The whole of what `transformers` gives a parameter, or buffer, of that name (float32, or of
    its own kind of integers): of a model on the meta device only this one is there for a while."""
    owner, _, key = name.rpartition(".")
    holder = model.get_submodule(owner)
    is_parameter = key in holder._parameters
    held = holder._parameters if is_parameter else holder._buffers
    absent = held[key]
    dtype = torch.float32 if absent.is_floating_point() else absent.dtype
    tensor = torch.empty(absent.shape, dtype=dtype, device=CPU)
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    held[key] = nn.Parameter(tensor) if is_parameter else tensor
    try:
        with torch.random.fork_rng(devices=[]), CPU, torch.no_grad():
            torch.default_generator.manual_seed(seed)
            initialise_upwards(model, owner)
    finally:
        held[key] = absent
    if tensor.is_floating_point() and tensor.isnan().any():
        raise UserError(f"model.config: transformers gives no initial values to {name}")
    return tensor


def _fill_buffers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        found = {key: module._buffers[key] for key in module._non_persistent_buffers_set}
        kept_out = {key: buffer for key, buffer in found.items() if buffer is not None}
        for key, absent in kept_out.items():
            value = torch.zeros(absent.shape, dtype=absent.dtype, device=CPU)
            module._buffers[key] = value.fill_(torch.nan) if value.is_floating_point() else value
        if kept_out:
            with CPU, torch.no_grad():
                _initialise(model, name)
        unknown = [key for key in kept_out if module._buffers[key].isnan().any()]
        if unknown:
            raise UserError(f"model.config: transformers gives no values to {name}.{unknown[0]}")


def initialise_upwards(model: nn.Module, name: str) -> None:
    """What `transformers` does to a module, and then to those that it lies in."""
    for place in _upwards(name):
        _initialise(model, place)


def _initialise(model: nn.Module, name: str) -> None:
    """What `transformers` does to a module without its parts; a model inside has its own way."""
    models = (model.get_submodule(place) for place in _upwards(name))
    nearest = next(one for one in models if hasattr(one, "_init_weights"))
    nearest._init_weights(model.get_submodule(name))


def _upwards(name: str) -> list[str]:
    """The names of a module and of those that it lies in."""
    parts = name.split(".") if name else []
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def read_fields(path: str) -> tuple[dict[str, Any], Path | None]:
    """The fields of the `config.json` that a folder, or a file, is, and the folder if it is one.

    Raises `UserError`.
    """
    place = expanded(path).resolve()
    file = place / "config.json" if place.is_dir() else place
    if not file.is_file():
        lacks = f"has no {file.name}" if place.is_dir() else "is no folder or file here"
        raise UserError(
            f"hf:{path}: {lacks}; nothing is downloaded: name a folder that has a model of "
            "transformers, or a config.json"
        )
    try:
        fields = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: is no JSON that can be read ({error})") from None
    if not isinstance(fields, dict):
        raise UserError(f"{file}: is no JSON object")
    return fields, place if place.is_dir() else None
