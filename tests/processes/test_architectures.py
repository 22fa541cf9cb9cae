"""Each architecture of docs/architectures.md trains over the axes that the page says."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing import set_forkserver_preload
from pathlib import Path

import models_on_disk  # offline, before transformers is imported
import pytest
import torch
from causal_lm_cases import NUM_STEPS, Case, assert_equals_plain_loop, run_rank
from ranks import formed_groups, open_file_store
from test_replica import Trained, train
from torch.multiprocessing import start_processes
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from elastic.geometry.layout import Layout
from elastic.geometry.sample_order import sample_of
from elastic.geometry.shard_map import region_of
from examples.masked_lm import loss, recipe_of
from pipelines.errors import UserError
from pipelines.hugging_face.architectures import (
    AXES,
    CAUSAL,
    ENCODERS,
    encoder_fields,
    encoder_plan,
    encoder_refusals,
    fields_of,
    refusals,
    sees_documents,
)
from pipelines.hugging_face.building import build
from pipelines.run.program import TrainingProgram
from pipelines.run.recipes import with_custom_model
from pipelines.settings import TrainSettings
from pipelines.settings.recipe import Recipe

NUM_PROCESSES = 2
SETTINGS = TrainSettings(batch=6, microbatch=2, dtype="float64", eval_every=0)
LEARNING_RATE = 1e-3
SAMPLE = ("phi3 tp=2", "gpt_neox pp=2", "gpt2 cp=2", "mamba dp=2", "qwen2_moe tp=2")
"""The causal models that continuous integration trains, each over one axis."""
INEXACT = ("gemma", "gemma2", "gemma3_text", "mamba", "deepseek_v3")
"""Models that compute in float32: Gemma its norms, Mamba its scan, DeepSeek its router."""
ENCODER_SAMPLE = ("bert fsdp=2", "deberta-v2 dp=2", "albert tp=2")


def save_model(folder: Path, family: str) -> None:
    torch.manual_seed(1)
    fields = fields_of(family)
    config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)


def cases_of(family: str) -> list[Case]:
    """The layouts of the axes over which the architecture trains."""
    reasons = refusals(family)
    axes = [axis for axis in AXES if reasons[axis] is None]
    across = not sees_documents(family)
    rel, atol = (1e-6, 1e-6) if family in INEXACT else (1e-9, 1e-12)
    return [Case(family, str(AXES[axis]), 2, across, rel, atol) for axis in axes]


def encoder_cases_of(family: str) -> list[Case]:
    reasons = encoder_refusals(encoder_recipe(family).model(), family)
    return [Case(family, str(AXES[axis])) for axis in AXES if reasons[axis] is None]


def encoder_recipe(family: str) -> Recipe:
    recipe = recipe_of(encoder_fields(family), encoder_plan(family))
    held_out = replace(recipe, settings=SETTINGS, held_out=recipe.data)
    return with_custom_model(held_out)


def run_encoder_rank(world_rank: int, folder: Path, cases: list[Case]) -> None:
    """The work of one process: train each encoder by its custom recipe."""
    torch.set_num_threads(1)
    store = open_file_store(folder, NUM_PROCESSES)
    for case in cases:
        recipe = encoder_recipe(case.model)
        program = TrainingProgram(recipe.settings.model_dump(mode="json"), None, "cpu", recipe)
        with formed_groups(Layout.parse(case.layout), store, case.name, world_rank) as groups:
            trained = train(program, groups, NUM_STEPS)
        torch.save(trained._asdict(), folder / f"{case.name}-{world_rank}.pt")


def train_plain_encoder(family: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of each step of a plain loop, and the weights at its end."""
    torch.manual_seed(SETTINGS.seed)
    recipe = encoder_recipe(family)
    model, data = recipe.model().double(), recipe.data()
    optimizer, losses = recipe.optimizer(list(model.named_parameters())), []
    for step in range(NUM_STEPS):
        first = step * SETTINGS.batch
        ids = [sample_of(SETTINGS.seed, first + i, len(data)) for i in range(SETTINGS.batch)]
        total, count = loss(
            model, [torch.stack(x) for x in zip(*map(data.__getitem__, ids), strict=True)]
        )
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / count).item())
    return losses, dict(model.named_parameters())


def train_cases(folder: Path, cases: list[Case]) -> None:
    for family in dict.fromkeys(case.model for case in cases):
        save_model(folder, family)
    set_forkserver_preload(["pipelines.run.program", "plain_causal_lm"])
    arguments = (folder, cases, NUM_PROCESSES)
    start_processes(run_rank, arguments, NUM_PROCESSES, start_method="forkserver")


def train_encoder_cases(folder: Path, cases: list[Case]) -> None:
    set_forkserver_preload(["pipelines.run.program", "plain_causal_lm"])
    start_processes(run_encoder_rank, (folder, cases), NUM_PROCESSES, start_method="forkserver")


def assert_encoder_equals_plain_loop(folder: Path, case: Case) -> None:
    losses, weights = train_plain_encoder(case.model)
    layout, recipe = Layout.parse(case.layout), encoder_recipe(case.model)
    program = TrainingProgram(recipe.settings.model_dump(mode="json"), None, "cpu", recipe)
    for rank in range(layout.num_workers):
        loaded = torch.load(folder / f"{case.name}-{rank}.pt", weights_only=False)
        trained = Trained(**loaded)
        assert trained.losses == pytest.approx(losses, rel=1e-9)
        for spec in program.specs():
            region = region_of(spec, layout, layout.coordinates(rank))
            if spec.kind == "parameter" and region is not None:
                torch.testing.assert_close(
                    trained.tensors[spec.name],
                    models_on_disk.slice_region(weights[spec.name].detach(), region),
                    rtol=1e-9,
                    atol=1e-11,
                )


@pytest.mark.parametrize("family", ENCODERS)
def test_encoder_is_refused_in_one_line(family: str) -> None:
    with pytest.raises(UserError, match=r"is an encoder|not a causal language model") as refused:
        build(encoder_fields(family))
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_sample_of_the_table_trains_as_plain_transformers(tmp_path: Path) -> None:
    cases = [case for family in CAUSAL for case in cases_of(family) if case.name in SAMPLE]
    assert {case.name for case in cases} == set(SAMPLE)
    train_cases(tmp_path, cases)
    for case in cases:
        assert_equals_plain_loop(tmp_path, case)


@pytest.mark.soak
def test_sample_of_encoders_trains_as_a_plain_loop(tmp_path: Path) -> None:
    cases = [case for family in ENCODERS for case in encoder_cases_of(family)]
    cases = [case for case in cases if case.name in ENCODER_SAMPLE]
    assert {case.name for case in cases} == set(ENCODER_SAMPLE)
    train_encoder_cases(tmp_path, cases)
    for case in cases:
        assert_encoder_equals_plain_loop(tmp_path, case)


@pytest.mark.soak
@pytest.mark.parametrize("family", CAUSAL)
def test_causal_model_trains_over_each_axis_of_its_row(tmp_path: Path, family: str) -> None:
    cases = cases_of(family)
    train_cases(tmp_path, cases)
    for case in cases:
        assert_equals_plain_loop(tmp_path, case)


@pytest.mark.soak
@pytest.mark.parametrize("family", ENCODERS)
def test_encoder_trains_over_each_axis_of_its_row(tmp_path: Path, family: str) -> None:
    cases = encoder_cases_of(family)
    train_encoder_cases(tmp_path, cases)
    for case in cases:
        assert_encoder_equals_plain_loop(tmp_path, case)
