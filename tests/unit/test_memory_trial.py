"""The memory trial counts without values what a real pass keeps, and less with recomputation."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from pipelines.hugging_face.causal_lm import TINY
from pipelines.run.program import make_workload
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings, HuggingFaceSettings, TrainSettings, TransformerSettings
from pipelines.training.replica import memory_trial
from pipelines.training.replica.gpu_memory import KeptAsOnGpu
from pipelines.training.replica.memory_trial import LiveBytes, pass_memory_of
from pipelines.training.workload.parallel_groups import ALONE
from pipelines.training.workload.workload import PADDING

SETTINGS = tiny().model_copy(
    update={"data": DataSettings(source="random", seq_len=32), "microbatch": 4}
)
NUM_LAYERS = 11
DEEP = SETTINGS.model.model_copy(update={"num_layers": NUM_LAYERS})
LLAMA = HuggingFaceSettings(
    config={**TINY, "num_hidden_layers": NUM_LAYERS, "vocab_size": 128, "hidden_size": 32}
)


def real_peak(settings: TrainSettings) -> tuple[int, int]:
    """The bytes that a real forward keeps, and the peak of forward and backward."""
    workload = make_workload(settings)
    module = workload.module(ALONE)
    live = LiveBytes([*module.parameters(), *module.buffers()])
    with live:
        batch = workload.empty(settings.microbatch)
        fed = workload.feed(batch, torch.device("cpu"), ALONE, PADDING)
        del batch
        loss = workload.losses(module, fed, ALONE).loss
        kept = live.now
        loss.backward()
    return kept, live.peak


def test_trial_counts_what_a_real_pass_keeps() -> None:
    trial = pass_memory_of(make_workload(SETTINGS), SETTINGS)
    kept, peak = real_peak(SETTINGS)
    assert trial.blocks_bytes + trial.outer_bytes == pytest.approx(kept, rel=0.02)
    gradients = sum(p.nbytes for p in make_workload(SETTINGS).module(ALONE).parameters())
    assert trial.last_bytes + gradients <= peak * 1.02
    assert trial.num_operations > 100


def test_recomputation_keeps_less_and_backward_needs_more() -> None:
    full = SETTINGS.model_copy(update={"activation_checkpointing": "full"})
    trial = pass_memory_of(make_workload(full), full)
    plain = pass_memory_of(make_workload(SETTINGS), SETTINGS)
    assert trial.blocks_bytes < plain.blocks_bytes / 5
    assert trial.block_bytes > plain.block_bytes


def test_tensor_parallelism_divides_most_activations() -> None:
    whole = pass_memory_of(make_workload(SETTINGS), SETTINGS)
    half = pass_memory_of(make_workload(SETTINGS), SETTINGS, tp=2)
    assert half.tp == 2 and not torch.distributed.is_initialized()
    assert whole.blocks_bytes / 2 <= half.blocks_bytes < whole.blocks_bytes * 0.7


def test_live_bytes_fall_when_tensors_are_freed() -> None:
    live = LiveBytes()
    with live:
        first = torch.zeros(1000)
        second = nn.functional.relu(first)
        assert live.now == 8000
        del first
        assert live.now == 4000
        del second
    gc.collect()
    assert (live.now, live.peak) == (0, 8000)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.RMSNorm(32), nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dropout(self.norm(hidden))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_gpus_keep_the_input_of_a_norm_and_a_mask_of_bytes(dtype: torch.dtype) -> None:
    module, hidden = Normed().to(dtype), torch.ones(64, 32, dtype=dtype, requires_grad=True)
    live = LiveBytes([hidden, *module.parameters()])
    with live, KeptAsOnGpu():
        output = module(hidden)
        rows, mask = 4 * len(hidden), hidden.numel()
        assert live.now == output.nbytes + rows + mask
        output.sum().backward()
    assert hidden.grad is not None and hidden.grad.shape == hidden.shape
    assert module.norm.weight.grad is not None and module.norm.weight.grad.dtype == dtype


def test_a_dropout_that_drops_nothing_keeps_nothing_on_a_gpu() -> None:
    module, hidden = Normed().eval(), torch.ones(64, 32, requires_grad=True)
    live = LiveBytes([hidden, *module.parameters()])
    with live, KeptAsOnGpu():
        output = module(hidden)
    assert live.now == output.nbytes + 4 * len(hidden)


def test_a_trial_for_a_gpu_keeps_less() -> None:
    bfloat16 = SETTINGS.model_copy(update={"dtype": "bfloat16"})
    on_cpu = pass_memory_of(make_workload(bfloat16), bfloat16)
    on_gpu = pass_memory_of(make_workload(bfloat16), bfloat16, on_gpu=True)
    assert 0.5 * on_cpu.blocks_bytes < on_gpu.blocks_bytes < 0.9 * on_cpu.blocks_bytes


@pytest.mark.parametrize(
    ("model", "changes", "tp", "on_gpu"),
    [
        (DEEP, {}, 1, False),
        (DEEP, {"activation_checkpointing": "full"}, 2, False),
        (DEEP, {"activation_checkpointing": "selective", "dtype": "bfloat16"}, 1, True),
        (LLAMA, {"activation_checkpointing": "full", "dtype": "bfloat16"}, 1, True),
    ],
)
def test_few_layers_suffice_for_a_deep_model(
    model: TransformerSettings | HuggingFaceSettings,
    changes: dict[str, object],
    tp: int,
    on_gpu: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The models are narrow, so that in the second case the peak is at the end of backward."""
    deep = SETTINGS.model_copy(update={"model": model, **changes})
    assert make_workload(deep).num_alike == NUM_LAYERS
    by_few = pass_memory_of(make_workload(deep), deep, tp, on_gpu)
    monkeypatch.setattr(memory_trial, "measure_depth", lambda workload, measure: measure(workload))
    assert by_few == pass_memory_of(make_workload(deep), deep, tp, on_gpu)


def test_layers_of_two_kinds_are_all_measured() -> None:
    kinds = ["sliding_attention", "full_attention"] * 6
    config = {**TINY, "model_type": "qwen2", "num_hidden_layers": 12, "layer_types": kinds}
    mixed = SETTINGS.model_copy(update={"model": HuggingFaceSettings(config=config)})
    assert make_workload(mixed).num_alike == 0
