"""Construction of `transformers` causal language models on the meta device, and initial values."""

from __future__ import annotations

import json
import sys
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actors.distributed.torch_private import direct_buffers, direct_parameters, transient_buffers
from pipelines.data.transformers_library import library
from pipelines.errors import UserError
from pipelines.hugging_face.routing.router_loss import refuse_unknown_router_loss
from pipelines.hugging_face.transformers_private import initialise, initialises
from pipelines.settings.home import expand_home
from pipelines.training.workload.initial_values import Distribution
from pipelines.training.workload.recorded_init import Recorder

CPU = torch.device("cpu")
UNSUPPORTED_FIELDS = ("auto_map", "quantization_config")
"""Config fields that require the model's custom code, or quantized weights."""


def config_of_model(fields: dict[str, Any]) -> Any:
    """The config object of a `config.json`.

    Raises `UserError` for a model that the installed `transformers` cannot build from it.
    """
    transformers, kind = library(), fields.get("model_type")
    subject = f"model.config: model_type={kind}"
    if kind not in transformers.CONFIG_MAPPING:
        version = transformers.__version__
        raise UserError(f"{subject} is unknown to the installed transformers {version}")
    unfit = [name for name in UNSUPPORTED_FIELDS if fields.get(name)]
    if unfit:
        raise UserError(f"{subject} has {' and '.join(unfit)}, which cannot be trained here")
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(fields)))
    except Exception as error:  # the config's own checks raise any type
        raise UserError(f"{subject}: {_one_line(error)}") from None
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{subject} is not a causal language model of transformers")
    return config


def build(fields: dict[str, Any], attention: str | None = None) -> nn.Module:
    """The model on the meta device, with its non-persistent buffers as real host tensors.

    `attention` is the name of a registered attention function; None: the model's default. Raises
    `UserError`.
    """
    transformers, config = library(), config_of_model(fields)
    # The grouped kernel lacks some dtypes, and gave wrong results for an expert without rows.
    options: dict[str, Any] = {"dtype": torch.float32, "experts_implementation": "eager"}
    if attention is not None:
        options["attn_implementation"] = attention
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, **options)
    except (ValueError, TypeError, AttributeError, KeyError, ImportError) as error:
        kind = fields["model_type"]
        raise UserError(f"model.config: model_type={kind}: {_one_line(error)}") from None
    if is_encoder(model):
        raise UserError(
            f"model.config: model_type={fields['model_type']} is an encoder, whose tokens see "
            "later ones: --set model.config.is_decoder=true, or train it by a custom recipe "
            "(docs/architectures.md)"
        )
    refuse_unknown_router_loss(model)
    model.config.use_cache = False
    _fill_buffers(model)
    assert isinstance(model, nn.Module)
    return model


def is_encoder(model: nn.Module) -> bool:
    """Whether the model, as configured, lets each token see later ones.

    `transformers` only warns. Some causal models have `is_decoder=false`, too, but no other mask.
    """
    config: Any = model.config
    code = vars(sys.modules[type(model).__module__])
    return getattr(config, "is_decoder", True) is False and "create_bidirectional_mask" in code


def input_embedding(model: nn.Module) -> nn.Module:
    """The module that embeds the tokens."""
    get: Any = model.get_input_embeddings
    embedding: nn.Module = get()
    return embedding


def output_embedding(model: nn.Module) -> nn.Module | None:
    """The module that computes the logits, if the model has it."""
    get: Any = model.get_output_embeddings
    head: nn.Module | None = get()
    return head


def text_config(model: nn.Module) -> Any:
    """The config of the language model in a model."""
    config: Any = model.config
    return config.get_text_config()


def pipeline_plan(model: nn.Module) -> tuple[str, ...]:
    """The modules of a model in the order in which a pipeline runs them; empty without a plan."""
    plan: Any = model.pp_plan
    return tuple(plan or ())


def tensor_plan(model: nn.Module) -> dict[str, str]:
    """The style of each module under tensor parallelism, by name with stars for numbers."""
    plan: Any = model.tp_plan
    return dict(plan or {})


def draw_tensor(model: nn.Module, name: str, seed: int) -> Tensor:
    """The whole initial value that `transformers` gives a parameter or buffer (float32, or its
    integer dtype).

    The model is on the meta device; only this tensor is allocated, temporarily.
    """
    owner, _, key = name.rpartition(".")
    holder = model.get_submodule(owner)
    is_parameter = key in direct_parameters(holder)
    own = direct_parameters(holder) if is_parameter else direct_buffers(holder)
    absent = own[key]
    assert absent is not None, f"{name} is neither a parameter nor a buffer"
    dtype = torch.float32 if absent.is_floating_point() else absent.dtype
    tensor = torch.empty(absent.shape, dtype=dtype, device=CPU)
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    own[key] = nn.Parameter(tensor) if is_parameter else tensor
    try:
        with torch.random.fork_rng(devices=[]), CPU, torch.no_grad():
            torch.default_generator.manual_seed(seed)
            initialise_upwards(model, owner)
    finally:
        own[key] = absent
    if tensor.is_floating_point() and tensor.isnan().any():
        raise UserError(f"model.config: transformers does not initialise {name}")
    return tensor


@cache
def distribution(model: nn.Module, name: str) -> Distribution | None:
    """The distribution from which `transformers` draws a parameter, determined without drawing it.

    The model is on the meta device, where random operations cost nothing, and a recorder notes the
    operations on the parameter. None for a buffer, and for a parameter that no single draw from a
    known distribution fills.
    """
    owner, _, key = name.rpartition(".")
    holder = model.get_submodule(owner)
    tensor = direct_parameters(holder).get(key)
    if tensor is None:
        return None
    recorder = Recorder(least_elements=inf)
    recorder.watch(tensor)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), recorder:
        initialise_upwards(model, owner)
    record = recorder.record(tensor)
    return record.distribution if record else None


def _fill_buffers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        own = direct_buffers(module)
        optional = {key: own[key] for key in transient_buffers(module)}
        transient = {key: buffer for key, buffer in optional.items() if buffer is not None}
        for key, absent in transient.items():
            value = torch.zeros(absent.shape, dtype=absent.dtype, device=CPU)
            own[key] = value.fill_(torch.nan) if value.is_floating_point() else value
        if transient:
            with CPU, torch.no_grad():
                _initialise(model, name)
        filled = {key: own[key] for key in transient}
        unknown = [key for key, value in filled.items() if value is None or value.isnan().any()]
        if unknown:
            raise UserError(f"model.config: transformers does not initialise {name}.{unknown[0]}")


def initialise_upwards(model: nn.Module, name: str) -> None:
    """Initialise a module, and then each module that contains it, as `transformers` does."""
    for place in _upwards(name):
        _initialise(model, place)


def _initialise(model: nn.Module, name: str) -> None:
    """Initialise a module without its children, by the innermost model that contains it."""
    models = (model.get_submodule(place) for place in _upwards(name))
    nearest = next(module for module in models if initialises(module))
    initialise(nearest, model.get_submodule(name))


def _upwards(name: str) -> list[str]:
    """The names of a module and of those that contain it, innermost first."""
    parts = name.split(".") if name else []
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def read_fields(path: str) -> tuple[dict[str, Any], Path | None]:
    """The fields of a `config.json`, given as a file or its folder; and the folder, if given.

    Raises `UserError`.
    """
    place = expand_home(path).resolve()
    file = place / "config.json" if place.is_dir() else place
    if not file.is_file():
        problem = f"has no {file.name}" if place.is_dir() else "no such folder or file"
        raise UserError(
            f"hf:{path}: {problem}; nothing is downloaded: name a folder with a transformers "
            "model, or a config.json"
        )
    try:
        fields = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error})") from None
    if not isinstance(fields, dict):
        raise UserError(f"{file}: is not a JSON object")
    return fields, place if place.is_dir() else None
