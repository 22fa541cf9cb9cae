"""The transformer: causality, document masks, rotary embeddings, loss, initial values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from elastic.geometry.regions import Region
from pipelines.data.synthetic import RandomWindows
from pipelines.errors import UserError
from pipelines.settings import MlpSettings, TrainSettings, TransformerSettings
from pipelines.training.models.language_model import LanguageModelWorkload
from pipelines.training.models.mlp import MlpWorkload
from pipelines.training.models.next_token import IGNORED
from pipelines.training.models.transformer import Transformer, rotary, rotate
from pipelines.training.workload.parallel_groups import ALONE
from pipelines.training.workload.state import initial_value, state_specs
from pipelines.training.workload.workload import PADDING, forward_loss

CPU = torch.device("cpu")
SMALL = TransformerSettings(
    vocab_size=16, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=24
)
SETTINGS = TrainSettings(model=SMALL)


def small_workload(model: TransformerSettings = SMALL) -> LanguageModelWorkload:
    return LanguageModelWorkload(model, RandomWindows("train", 8, vocab_size=16), None)


def small_model(model: TransformerSettings = SMALL) -> Transformer:
    torch.manual_seed(0)
    return Transformer(model).double()


def tokens_of(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def test_logits_do_not_depend_on_later_tokens() -> None:
    model = small_model()
    tokens = torch.randint(16, (2, 9))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 16
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_document_is_predicted_as_if_it_were_alone() -> None:
    model = small_model()
    tokens = torch.randint(16, (1, 10))
    documents = tokens_of([3, 3, 3, 3, 5, 5, 5, 6, 6, 6])
    together = model(tokens, documents)
    for first, last in ((0, 4), (4, 7), (7, 10)):
        alone = model(tokens[:, first:last])
        torch.testing.assert_close(together[:, first:last], alone)
    assert not torch.allclose(together[:, 4:], model(tokens)[:, 4:])


def test_grouped_query_heads_equal_repeated_full_heads() -> None:
    grouped = small_model()
    full = small_model(SMALL.model_copy(update={"num_kv_heads": 4}))
    state = grouped.state_dict()
    for name in [name for name in state if ".wk." in name or ".wv." in name]:
        heads = state[name].unflatten(0, (2, 4))
        state[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    tokens = torch.randint(16, (2, 6))
    torch.testing.assert_close(grouped(tokens), full(tokens))


@settings(max_examples=20, deadline=None)
@given(shift=st.integers(0, 40), distance=st.integers(0, 20))
def test_rotated_heads_depend_on_their_distance_only(shift, distance) -> None:
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(1, 2, 1, 8, dtype=torch.float64, generator=generator)
    angles = rotary(torch.arange(64), 8, 10_000.0)
    key = rotate(heads[:, :1], angles[:, shift : shift + 1])
    query = rotate(heads[:, 1:], angles[:, shift + distance : shift + distance + 1])
    first_key = rotate(heads[:, :1], angles[:, :1])
    first_query = rotate(heads[:, 1:], angles[:, distance : distance + 1])
    torch.testing.assert_close((query * key).sum(), (first_query * first_key).sum())


def test_loss_is_a_sum_over_targets_that_are_not_ignored() -> None:
    workload, model = small_workload(), small_model()
    batch = workload.read([0, 5, 7])
    logits = model(batch.tokens).flatten(0, 1)
    expected = cross_entropy(logits, batch.targets.flatten(), reduction="sum")
    batch_on_device = workload.feed(batch, CPU, ALONE, 1)
    torch.testing.assert_close(forward_loss(workload, model, batch_on_device), expected)
    assert workload.num_tokens(batch.targets) == 24
    partly_ignored = batch.targets.clone()
    partly_ignored[:, 4:] = IGNORED
    assert workload.num_tokens(partly_ignored) == 12


@pytest.mark.parametrize(
    "workload", [small_workload(), MlpWorkload(MlpSettings(dims=(4, 3, 2)), 0)]
)
@pytest.mark.parametrize("num_samples", [0, 2])
def test_empty_batch_has_zero_loss_and_zero_gradients(workload, num_samples) -> None:
    torch.manual_seed(0)
    module = workload.module()
    batch_on_device = workload.feed(workload.empty(num_samples), CPU, ALONE, PADDING)
    loss = forward_loss(workload, module, batch_on_device)
    loss.backward()
    assert loss.item() == 0
    assert workload.num_tokens(batch_on_device.targets) == 0
    assert all(not parameter.grad.any() for parameter in module.parameters())


def test_data_with_a_larger_vocabulary_than_the_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size=17"):
        LanguageModelWorkload(SMALL, RandomWindows("train", 8, vocab_size=17), None)


def test_state_has_every_parameter_and_its_optimizer_state() -> None:
    specs = {spec.name: spec for spec in state_specs(small_workload(), SETTINGS)}
    weight = specs["layers.1.attention.wk.weight"]
    assert (weight.shape, weight.layer, weight.tp_dim) == ((8, 16), 2, 0)
    assert (weight.fsdp_dim, weight.kind, weight.dtype) == (0, "parameter", "float32")
    moment = specs["optimizer.layers.1.attention.wk.weight.exp_avg_sq"]
    assert (moment.shape, moment.layer, moment.fsdp_dim) == ((8, 16), 2, 0)
    count = specs["optimizer.layers.1.attention.wk.weight.step"]
    assert (count.shape, count.fsdp_dim, count.kind) == ((), None, "optimizer")
    assert (specs["embedding.weight"].layer, specs["head.weight"].layer) == (0, 3)
    num_parameters = sum(spec.kind == "parameter" for spec in specs.values())
    assert len(specs) == 4 * num_parameters == 4 * (3 + 2 * 9)


@settings(max_examples=20, deadline=None)
@given(num_chunks=st.integers(1, 7), index=st.integers(0, 6), spec_index=st.integers(0, 9))
def test_initial_values_are_a_function_of_seed_and_name(num_chunks, index, spec_index) -> None:
    workload = small_workload()
    spec = state_specs(workload, SETTINGS)[spec_index]
    whole = Region.whole(spec.shape)
    full = initial_value(workload, SETTINGS, spec, whole)
    region = whole.chunk(0, num_chunks, min(index, num_chunks - 1))
    part = initial_value(workload, SETTINGS, spec, region)
    first = region.offsets[0]
    assert torch.equal(part, full[first : first + region.shape[0]])
    other = SETTINGS.model_copy(update={"seed": 1})
    assert spec.name.endswith("norm.weight") or not torch.equal(
        initial_value(workload, other, spec, whole), full
    )


def test_random_vectors_are_a_function_of_seed_and_sample() -> None:
    workload = MlpWorkload(MlpSettings(dims=(6, 4, 9)), seed=3)
    batch = workload.read([4, 1, 4])
    assert torch.equal(batch.inputs[0], batch.inputs[2])
    assert not torch.equal(batch.inputs[0], batch.inputs[1])
    assert batch.targets.shape == (3, 9)
    assert not torch.equal(workload.read([4], held_out=True).inputs[0], batch.inputs[0])
