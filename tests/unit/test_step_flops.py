"""The operations of a step, against formulas, and the peaks of devices by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipelines.run.program import make_workload
from pipelines.settings import DataSettings, ExpertsSettings, TrainSettings, TransformerSettings
from pipelines.training.replica.step_flops import ForwardFlops, count_step_flops, peak_flops

BATCH, SEQ_LEN = 6, 32
MODEL = TransformerSettings(
    vocab_size=100, dim=64, num_layers=3, num_heads=4, num_kv_heads=2, hidden_dim=128, dropout=0.1
)
SETTINGS = TrainSettings(
    model=MODEL, batch=BATCH, data=DataSettings(source="random", seq_len=SEQ_LEN)
)


def count(settings: TrainSettings) -> float | None:
    return count_step_flops(make_workload(settings), settings)


def transformer_products() -> int:
    """The multiplications of a token in a forward pass; causal attention counts as whole."""
    matrices = 2 * MODEL.dim**2 + 2 * MODEL.dim * MODEL.dim // 2 + 3 * MODEL.dim * MODEL.hidden_dim
    attention = 2 * MODEL.dim * SEQ_LEN
    return MODEL.num_layers * (matrices + attention) + MODEL.dim * MODEL.vocab_size


def test_transformer_step_has_six_operations_for_each_product() -> None:
    assert count(SETTINGS) == 6 * transformer_products() * SEQ_LEN * BATCH


def test_recomputation_does_not_count() -> None:
    recomputing = SETTINGS.model_copy(update={"activation_checkpointing": True})
    assert count(recomputing) == count(SETTINGS)


def test_experts_count_by_the_costs_of_their_layers() -> None:
    experts = ExpertsSettings(num_experts=4, top_k=2, hidden_dim=64, shared_hidden_dim=0)
    sparse = SETTINGS.model_copy(update={"model": MODEL.model_copy(update={"experts": experts})})
    chosen = count(sparse)
    more = experts.model_copy(update={"num_experts": 8})
    more_experts = sparse.model_copy(update={"model": MODEL.model_copy(update={"experts": more})})
    assert chosen is not None and count(more_experts) == pytest.approx(chosen, rel=0.02)


def test_only_the_first_forward_pass_is_counted() -> None:
    module, settings = nn.Linear(10, 20, bias=False), TrainSettings(batch=12, microbatch=3)
    counter = ForwardFlops()
    counter.watch(module)
    module(torch.zeros(3, 10)).sum().backward()
    module(torch.zeros(3, 10))
    assert counter.of_step(settings) == 3 * (2 * 10 * 20) * 12


def test_module_that_is_not_called_has_no_count() -> None:
    counter = ForwardFlops()
    counter.watch(nn.Linear(2, 2))
    assert counter.of_step(SETTINGS) is None


def test_module_that_raises_leaves_nothing_behind() -> None:
    module, counter = nn.Linear(10, 20), ForwardFlops()
    counter.watch(module)
    with pytest.raises(RuntimeError):
        module(torch.zeros(3, 11))
    assert counter.of_step(SETTINGS) is None
    module(torch.zeros(3, 10))
    assert counter.of_step(SETTINGS) is None, "no later pass is counted"


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA L40S", 362.0),
        ("Some other GPU", None),
        ("", None),
    ],
)
def test_peak_of_half_precision_is_known_by_name(name: str, tflops: float | None) -> None:
    half = SETTINGS.model_copy(update={"dtype": "bfloat16"})
    assert peak_flops(name, half) == (tflops and tflops * 1e12)
    assert peak_flops(name, SETTINGS) is None, "the table is of half precision"
    own = SETTINGS.model_copy(update={"peak_tflops": 3.5})
    assert peak_flops(name, own) == 3.5e12
