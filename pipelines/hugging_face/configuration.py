"""Conversion between our transformer's settings and a `config.json` of `transformers`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipelines.data.cache import local_folder
from pipelines.errors import UserError
from pipelines.settings import CacheSettings, ExpertsSettings, TransformerSettings

CONFIG = "config.json"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "granitemoeshared": "GraniteMoeSharedForCausalLM"}
DEFAULT_THETA = 10_000.0
"""The default of `transformers` for a config without `rope_theta`."""


def config_of(
    model: TransformerSettings, dtype: str, seq_len: int, separator: int | None
) -> dict[str, Any]:
    """The `config.json` of a model. `separator` is the token that ends a document, if known.

    It also has the names of `transformers` 4.x, `rope_theta` and `torch_dtype`, for servers built
    on that version.
    """
    kind = "granitemoeshared" if model.experts else "llama"
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.dim // model.num_heads,
        "intermediate_size": model.experts.hidden_dim if model.experts else model.hidden_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "max_position_embeddings": seq_len,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": separator,
        "pad_token_id": None,
    }
    return config | (_mixture(model, model.experts) if model.experts else {})


def _mixture(model: TransformerSettings, experts: ExpertsSettings) -> dict[str, Any]:
    return {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "shared_intermediate_size": experts.shared_hidden_dim,
        "router_aux_loss_coef": experts.balance_coefficient,
        "attention_multiplier": _attention_scale(model),
        **dict.fromkeys(ONES, 1.0),
    }


ONES = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
"""Scaling factors of Granite that our model does not have."""

DEFAULTS = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
DEFAULTS |= dict.fromkeys((*ONES, "attention_multiplier"), 1.0)
"""The meaning of a config that lacks these fields."""


def _attention_scale(model: TransformerSettings) -> float:
    return 1 / math.sqrt(model.dim // model.num_heads)


def transformer_from(folder: str | Path) -> TransformerSettings:
    """Our settings for the model in a `transformers` folder, for a recipe with that `init_from`.

    The folder may be at a URL. Raises `UserError` if there is no model, or our transformer does not
    support it.
    """
    place = local_folder(str(folder), CacheSettings())
    return settings_of(read_config(place), Path(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a `transformers` folder; raises `UserError`."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: there is no such folder; download the model and name the folder with "
            f"its {CONFIG}"
        )
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except OSError as error:
        raise UserError(f"{folder / CONFIG}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{folder / CONFIG}: is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise UserError(f"{folder / CONFIG}: is not a JSON object")
    return config


def settings_of(config: dict[str, Any], folder: Path) -> TransformerSettings:
    """Our settings for a `config.json`; `folder` is for error messages. Raises `UserError`."""
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise UserError(
            f"{folder / CONFIG}: model_type={kind}, but the built-in transformer supports only "
            f"{' or '.join(ARCHITECTURES)}; train it as hf:{folder}"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    try:
        heads = config["num_attention_heads"]
        model = TransformerSettings(
            vocab_size=config["vocab_size"],
            dim=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            hidden_dim=config["intermediate_size"],
            rope_theta=rope.get("rope_theta", config.get("rope_theta", DEFAULT_THETA)),
            norm_eps=config["rms_norm_eps"],
            experts=_experts(config) if kind == "granitemoeshared" else None,
        )
    except KeyError as error:
        raise UserError(f"{folder / CONFIG}: has no {error}") from None
    except ValidationError as error:
        problems = "; ".join(f"{item['loc'][-1]}: {item['msg']}" for item in error.errors())
        raise UserError(f"{folder / CONFIG}: {problems}") from None
    _refuse_unsupported(config, rope, model, folder)
    return model


def _experts(config: dict[str, Any]) -> ExpertsSettings:
    return ExpertsSettings(
        num_experts=config["num_local_experts"],
        top_k=config["num_experts_per_tok"],
        hidden_dim=config["intermediate_size"],
        shared_hidden_dim=config.get("shared_intermediate_size", 0),
    )


def _refuse_unsupported(
    config: dict[str, Any], rope: dict[str, Any], model: TransformerSettings, folder: Path
) -> None:
    """Raise `UserError` for a config with features that our transformer does not have."""
    supported: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "head_dim": (None, model.dim // model.num_heads),
        "rope_type": ("default",),
    }
    fields: dict[str, Any] = DEFAULTS | config
    fields["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    if model.experts:
        supported |= dict.fromkeys(ONES, (1.0,))
        scale = _attention_scale(model)
        same = math.isclose(fields["attention_multiplier"], scale, rel_tol=1e-6)
        supported["attention_multiplier"] = (fields["attention_multiplier"] if same else scale,)
    for key, values in supported.items():
        if fields.get(key) not in values:
            known = " or ".join(str(value) for value in values if value is not None)
            raise UserError(
                f"{folder / CONFIG}: {key}={fields.get(key)}, but the built-in transformer "
                f"supports only {known}; train it as hf:{folder}"
            )
