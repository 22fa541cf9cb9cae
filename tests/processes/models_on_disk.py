"""Runs with a checkpoint of a random transformer, and models of the real `transformers`."""

from __future__ import annotations

import json
import os
from dataclasses import astuple
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GraniteMoeSharedConfig, LlamaConfig, PreTrainedModel

from actors.storage.checkpoint_files import folder_of, publish
from actors.storage.storage import DiskStorage
from elastic.geometry.layout import Layout
from elastic.geometry.regions import Region
from elastic.geometry.shard_map import region_of, sharding_of
from elastic.protocol.events import PartFile
from pipelines.run.program import TrainingProgram
from pipelines.settings import DataSettings, ExpertsSettings, TrainSettings, TransformerSettings
from pipelines.training.checkpoint.part_file import write_part
from pipelines.training.models.transformer import Transformer

DENSE = TransformerSettings(
    vocab_size=70,
    dim=48,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    hidden_dim=80,
    rope_theta=500.0,
    norm_eps=1e-6,
)
SHARED = ExpertsSettings(num_experts=4, top_k=2, hidden_dim=24, shared_hidden_dim=16)
MIXTURE = DENSE.model_copy(update={"experts": SHARED})
ONLY_ROUTED = DENSE.model_copy(
    update={"experts": SHARED.model_copy(update={"shared_hidden_dim": 0, "top_k": 1})}
)
SEQ_LEN = 40
TOKENS = torch.randint(64, (3, SEQ_LEN), generator=torch.Generator().manual_seed(3))
CLOSE = {"rtol": 0.0, "atol": 1e-5}


def settings_for(model: TransformerSettings, **changes: object) -> TrainSettings:
    data = DataSettings(source="random", seq_len=SEQ_LEN)
    return TrainSettings(model=model, data=data, batch=4, steps=1, **changes)


def random_weights(model: TransformerSettings, seed: int = 0) -> dict[str, Tensor]:
    """Weights whose logits spread by about 1: at twice that, rounding alone reaches 1e-5."""
    torch.manual_seed(seed)
    weights = {}
    for name, tensor in Transformer(model).state_dict().items():
        noise = 0.12 * torch.randn(tensor.shape)
        weights[name] = 1 + noise if tensor.ndim == 1 else noise
    return weights


def our_logits(model: TransformerSettings, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    module = Transformer(model)
    module.load_state_dict(weights)
    with torch.no_grad():
        return module.eval()(tokens)


def slice_region(tensor: Tensor, region: Region) -> Tensor:
    ends = zip(region.offsets, region.shape, strict=True)
    return tensor[tuple(slice(first, first + length) for first, length in ends)]


def write_run(
    storage: Path,
    settings: TrainSettings,
    layout: Layout,
    weights: dict[str, Tensor],
    *,
    name: str = "first",
    step: int = 3,
    data_folder: Path | None = None,
) -> Path:
    """Write a checkpoint into a run's folder, sharded as `layout` shards parameters."""
    run = storage / name
    checkpoint = DiskStorage(run / folder_of(step, 1))
    run.mkdir(parents=True, exist_ok=True)
    kwargs = {"settings": settings.model_dump(mode="json"), "data_folder": data_folder}
    recipe = {**kwargs, "data_folder": data_folder and str(data_folder)}
    (run / "recipe.json").write_text(json.dumps(recipe))
    specs = [spec for spec in TrainingProgram(**kwargs).specs() if spec.kind == "parameter"]
    files = []
    for world_rank in range(layout.num_workers):
        parts = {}
        for spec in specs:
            region = region_of(spec, layout, layout.coordinates(world_rank))
            if region and sharding_of(spec, layout).first_holder(world_rank) == world_rank:
                parts[spec.name] = (region, slice_region(weights[spec.name], region))
        file = f"part-w{world_rank}.safetensors"
        written = write_part(checkpoint, file, parts)
        files.append(PartFile(file, *astuple(written)))
    publish(DiskStorage(run), step, 1, files)
    return run


def load_pretrained(folder: Path, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """The model that transformers loads from the folder, in the folder's dtype."""
    model, loading_info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    assert not any(loading_info.values()), loading_info
    return model.eval()


def their_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens).logits


def llama(**changes: object) -> PreTrainedModel:
    """A random LlamaForCausalLM of the shape of `DENSE`."""
    sizes = {
        "vocab_size": 70,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 80,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.12,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(LlamaConfig(**(sizes | changes))).eval()


def granite(**changes: object) -> PreTrainedModel:
    """A random GraniteMoeSharedForCausalLM of the shape of `MIXTURE`."""
    sizes = llama().config.to_dict() | {
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
        "attention_multiplier": 8**-0.5,
    }
    for key in ("model_type", "architectures", "mlp_bias", "head_dim", "pretraining_tp"):
        sizes.pop(key)
    torch.manual_seed(1)
    config = GraniteMoeSharedConfig(**(sizes | changes))
    return AutoModelForCausalLM.from_config(config).eval()
