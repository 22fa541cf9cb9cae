"""Models of `transformers`, sharded by their own plans, train as in plain `transformers`."""

from __future__ import annotations

import json
from multiprocessing import set_forkserver_preload
from pathlib import Path

import models_on_disk  # offline, before transformers is imported
import plain_causal_lm
import pytest
import torch
from causal_lm_cases import (
    BATCH,
    Case,
    assert_equals_plain_loop,
    run_rank,
    settings_for,
    train_plain_model,
)
from harness import run_in_processes
from run_checks import assert_no_step_repeated
from test_replica import program_of
from torch.multiprocessing import start_processes
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from actors.runtime.fault_spec import Fault
from elastic.geometry.regions import Region
from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import LayoutRequested
from pipelines.errors import UserError
from pipelines.hugging_face.anatomy import anatomy_of
from pipelines.hugging_face.architectures import fields_of
from pipelines.hugging_face.building import build
from pipelines.hugging_face.weights.export import export
from pipelines.run.plan import TrainRequest, make_plan
from pipelines.run.recipes import load
from pipelines.settings import CheckpointSettings

NUM_PROCESSES = 4
SIZES = {
    "vocab_size": 70,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "initializer_range": 0.12,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "dropout": {"attention_dropout": 0.2},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
}


CASES = [
    Case("llama", "dp=2"),
    Case("llama", "fsdp=2"),
    Case("llama", "pp=2,tp=2", 2),
    Case("tied", "fsdp=2,tp=2"),
    Case("qwen3", "fsdp=2,tp=2"),
    Case("mixtral", "fsdp=2"),
    Case("llama", "fsdp=2,zero=2"),
    Case("llama", "pp=4"),
    Case("tied", "fsdp=3"),
    Case("qwen2", "tp=2"),
    Case("dropout", "tp=2", BATCH),
    Case("dropout", "pp=2", BATCH),
    Case("dropout", "pp=2,tp=2", BATCH),
    Case("qwen2", "pp=2,fsdp=2"),
    Case("mixtral", "tp=2"),
    Case("mixtral", "pp=2,tp=2"),
    Case("llama", "cp=2,tp=2"),
    Case("qwen3", "pp=2,cp=2", 2),
    Case("tied", "fsdp=2,cp=2"),
    Case("tied", "pp=2,fsdp=2"),
    Case("tied", "pp=2,tp=2,zero=2"),
    Case("tied", "pp=3"),
]


def save_model(folder: Path, name: str) -> Path:
    """A random model, saved by `transformers`."""
    model_folder = folder / name
    if not model_folder.exists():
        kind = "llama" if name in ("tied", "dropout") else name
        torch.manual_seed(1)
        config = CONFIG_MAPPING[kind](**SIZES | MODELS[name])
        AutoModelForCausalLM.from_config(config).save_pretrained(
            model_folder, max_shard_size="50KB"
        )
    return model_folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all cases, computed by four processes."""
    folder = tmp_path_factory.mktemp("trained")
    for case in CASES:
        save_model(folder, case.model)
    set_forkserver_preload(["pipelines.run.program", "plain_causal_lm"])
    start_processes(
        run_rank, (folder, CASES, NUM_PROCESSES), NUM_PROCESSES, start_method="forkserver"
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sharded_model_trains_as_plain_transformers(trained: Path, case: Case) -> None:
    assert_equals_plain_loop(trained, case)


@pytest.mark.slow
def test_killed_and_resharded_run_is_exported_for_transformers(tmp_path: Path) -> None:
    """`transformers` loads the export."""
    model_folder = save_model(tmp_path, "qwen3")
    settings = settings_for(
        model_folder, steps=14, eval_every=0, checkpoint=CheckpointSettings(every=7)
    )
    kill = Fault("kill", "w3", 4, "compute")
    due = ((8, LayoutRequested("other", TargetLayout.parse("dp=2,tp=2"))),)
    run = run_in_processes(
        tmp_path / "run", settings, 4, layout="dp=2,fsdp=2", due=due, faults=(kill,)
    )
    assert run.stopped.outcome == "completed"
    assert_no_step_repeated(run)
    assert "tp=2" in run.lines_of("Resume")[-1]["layout"], "dp uses the workers that are left"
    losses_and_norms, weights = train_plain_model(settings, settings.steps)
    assert [run.losses()[n] for n in range(1, 15)] == pytest.approx(
        [loss for loss, _ in losses_and_norms], rel=1e-9
    )
    (run.folder / "recipe.json").write_text(
        json.dumps({"settings": settings.model_dump(mode="json"), "data_folder": None})
    )
    export("run", tmp_path, tmp_path / "out", shard_bytes=50_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    stored = models_on_disk.load_pretrained(tmp_path / "out", torch.float64).state_dict()
    for name, weight in weights.items():
        torch.testing.assert_close(stored[name], weight, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_dropout_of_a_killed_pipeline_is_that_of_one_worker(tmp_path: Path) -> None:
    """The three microbatches of a step draw alike on two stages, and on one worker."""
    settings = settings_for(save_model(tmp_path, "dropout"), steps=8, microbatch=2, eval_every=0)
    kill = Fault("kill", "w1", 4, "compute")
    run = run_in_processes(tmp_path / "run", settings, 2, layout="pp=2", faults=(kill,))
    assert run.stopped.outcome == "completed"
    assert [line["layout"] for line in run.lines_of("Resume")] == ["pp=2", "dp=1"]
    alone = run_in_processes(tmp_path / "alone", settings, 1)
    assert list(run.losses().values()) == pytest.approx(list(alone.losses().values()), rel=1e-9)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("starcoder2", {"embedding_dropout": 0.1}, "outside of its layers"),
        ("starcoder2", {"residual_dropout": 0.1, "attention_dropout": 0.2}, None),
        ("gpt_neox", {"hidden_dropout": 0.1}, None),
        ("phi", {"embd_pdrop": 0.1, "resid_pdrop": 0.1}, None),
        ("mixtral", {"attention_dropout": 0.1, "router_jitter_noise": 0.1}, None),
    ],
)
def test_draws_outside_of_layers_are_refused_under_pp(
    family: str, fields: dict[str, float], message: str | None
) -> None:
    reason = dict(anatomy_of(build(fields_of(family) | fields)).shape.limits.refused).get("pp")
    assert reason is None if message is None else message in (reason or "")
    assert "\n" not in (reason or "")


@pytest.mark.parametrize("multiplier", [1.0, 12.0])
def test_changes_of_hidden_states_outside_of_layers_are_refused_under_pp(multiplier: float) -> None:
    """Each stage would multiply what it gets from the stage before."""
    fields = fields_of("granite") | {"embedding_multiplier": multiplier}
    reason = dict(anatomy_of(build(fields)).shape.limits.refused).get("pp")
    message = "changes hidden states outside of its layers, which each stage would repeat"
    assert reason is None if multiplier == 1 else message in (reason or "")


def test_initial_values_are_those_of_the_folder_or_of_transformers(tmp_path: Path) -> None:
    """The files may have any tensor names; a config alone gives the same values each time."""
    model_folder = save_model(tmp_path, "mixtral")
    program = program_of(settings_for(model_folder))
    assert not program.pretrained.is_direct, "experts are stored one by one"
    state_dict = plain_causal_lm.load(model_folder).state_dict()
    parameters = [spec for spec in program.specs() if spec.kind == "parameter"]
    for spec in parameters:
        value = program.initial(spec, Region.whole(spec.shape))
        assert torch.equal(value, state_dict[spec.name])
    programs = [program_of(settings_for(model_folder, init_from=None)) for _ in range(2)]
    for spec in parameters:
        first, second = (
            new_program.initial(spec, Region.whole(spec.shape)) for new_program in programs
        )
        assert torch.equal(first, second)
        std = 0.0 if spec.name.endswith("norm.weight") else 0.12
        assert first.std().item() == pytest.approx(std, abs=0.02)
    assert torch.equal(
        programs[0].initial(parameters[-2], Region.whole((48,))), torch.ones(48).double()
    )


UNSUPPORTED = {
    "cp": ("mistral", "cp=2", "sliding_window=4096"),
    "ep": ("llama", "fsdp=2,ep=2", "no experts"),
    "odd heads": ("qwen2", "tp=4", "tp=4 does not divide 2"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_axis_of_a_model_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    model, layout, message = UNSUPPORTED[name]
    model_folder = save_model(tmp_path, model)
    request = TrainRequest(
        f"hf:{model_folder}", storage=str(tmp_path), workers="4", layout=layout, data="random"
    )
    with pytest.raises(UserError, match=message):
        make_plan(request, 0)


UNUSABLE_CONFIGS = {
    "no file": (None, "nothing is downloaded"),
    "unknown kind": ({"model_type": "lama"}, "unknown to the installed"),
    "no language model": ({"model_type": "vit"}, "not a causal language model"),
    "quantised": ({"model_type": "llama", "quantization_config": {"a": 1}}, "quantization_config"),
    "bad value": ({"model_type": "llama", "hidden_size": 50, "num_attention_heads": 4}, "multiple"),
}


@pytest.mark.parametrize("name", UNUSABLE_CONFIGS)
def test_unusable_config_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    fields, message = UNUSABLE_CONFIGS[name]
    file = tmp_path / "config.json"
    if fields is not None:
        file.write_text(json.dumps(fields))
    with pytest.raises(UserError, match=message) as refused:
        load(f"hf:{file}")
    assert "\n" not in str(refused.value)
