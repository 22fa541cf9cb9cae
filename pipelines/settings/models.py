"""Settings of the model: built-in models, models of `transformers`, custom models, adapters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from pipelines.errors import UserError
from pipelines.settings.bounds import Depth, Fraction, NonNegativeInt, PositiveInt, Width
from pipelines.settings.setting import Settings, setting

KIND = "The kind of model. The recipe chooses it."


class ExpertsSettings(Settings):
    """A mixture of experts (Shazeer et al., 2017), which replaces the feed-forward network of each
    layer."""

    num_experts: Width = setting(8, "The number of experts in each layer.")
    top_k: Width = setting(
        2,
        "The number of experts that each token uses. With 1 the router learns from the "
        "load-balancing loss alone.",
    )
    hidden_dim: Width = setting(352, "The hidden width of an expert.")
    shared_hidden_dim: Annotated[int, Field(ge=0, le=10**8)] = setting(
        0, "The hidden width of an expert that all tokens use; 0: none."
    )
    balance_coefficient: NonNegativeFloat = setting(
        0.01, "The weight of the load-balancing loss against the loss of a token."
    )

    @model_validator(mode="after")
    def enough_to_choose_from(self) -> ExpertsSettings:
        if self.top_k > self.num_experts:
            raise UserError(
                f"model.experts.top_k={self.top_k} exceeds model.experts.num_experts="
                f"{self.num_experts}: set top_k to at most {self.num_experts}"
            )
        return self


class TransformerSettings(Settings):
    """A decoder-only transformer of the Llama family (Touvron et al., 2023)."""

    kind: Literal["transformer"] = setting("transformer", KIND)
    vocab_size: Width = setting(
        264,
        "The number of token ids; it may exceed that of the data. The default is 256 bytes and the "
        "separator, rounded up to a multiple that 2, 3, 4, 6 and 8 shards divide evenly.",
    )
    dim: Width = setting(256, "The width of the residual stream.")
    num_layers: Depth = setting(4, "The number of layers.")
    num_heads: Width = setting(8, "The number of query heads.")
    num_kv_heads: Width = setting(
        4, "The number of key and value heads; equal groups of query heads share one."
    )
    hidden_dim: Width = setting(704, "The hidden width of the feed-forward network.")
    rope_theta: PositiveFloat = setting(10_000.0, "The base of the rotary embedding.")
    norm_eps: PositiveFloat = setting(1e-5, "The epsilon of RMSNorm.")
    dropout: Fraction = setting(0.0, "The dropout probability.")
    experts: ExpertsSettings | None = setting(
        None, "A mixture of experts instead of the feed-forward network of width `hidden_dim`."
    )

    @model_validator(mode="after")
    def heads_fit(self) -> TransformerSettings:
        if self.dim % (2 * self.num_heads):
            raise UserError(
                f"model.dim={self.dim} must be a multiple of 2 x model.num_heads={self.num_heads}: "
                "the rotary embedding of a head needs an even width"
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model.num_heads={self.num_heads} must be a multiple of "
                f"model.num_kv_heads={self.num_kv_heads}: equal groups of query heads share one"
            )
        return self


class MlpSettings(Settings):
    """A multi-layer perceptron on random vectors, for benchmarks and tests."""

    kind: Literal["mlp"] = setting("mlp", KIND)
    dims: tuple[Width, ...] = setting(
        (512, 1024, 1024, 512), "The widths of the input, the hidden layers and the output."
    )
    num_samples: PositiveInt = setting(65_536, "The number of random vectors.")

    @model_validator(mode="after")
    def has_a_layer(self) -> MlpSettings:
        if len(self.dims) < 2:
            raise UserError(f"model.dims={self.dims}: give at least an input and an output width")
        return self


class HuggingFaceSettings(Settings):
    """A causal language model of the installed `transformers`."""

    kind: Literal["hugging_face"] = setting("hugging_face", KIND)
    config: dict[str, Any] = setting(
        {},
        "The model's `config.json`. If empty, it is read from the folder that `init_from` names.",
    )


class CustomModelSettings(Settings):
    """A custom module, built by a `pipelines.settings.recipe.Recipe`."""

    kind: Literal["custom"] = setting("custom", KIND)


class LoraSettings(Settings):
    """Low-rank adapters of `peft` (Hu et al., LoRA, 2021), trained instead of the weights."""

    rank: NonNegativeInt = setting(0, "The rank of the adapters; 0 trains the weights themselves.")
    alpha: PositiveFloat = setting(16.0, "An adapter's output is multiplied by `alpha` / `rank`.")
    targets: tuple[str, ...] = setting(
        (),
        "The last parts of the names of the linear layers that get an adapter; empty: all but the "
        "head.",
    )
