"""Models of `transformers`, sharded by their own plans, train as in plain `transformers`."""

from __future__ import annotations

import json
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import NamedTuple

import models_on_disk  # offline, before transformers is imported
import plain_causal_lm
import pytest
import torch
from harness import run_in_processes
from ranks import formed_groups, open_file_store
from run_checks import assert_no_step_repeated
from test_replica import Trained, program_of, train
from torch.multiprocessing import start_processes
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from actors.runtime.fault_spec import Fault
from elastic.geometry.layout import Layout
from elastic.geometry.regions import Region
from elastic.geometry.sample_order import sample_of
from elastic.geometry.shard_map import region_of
from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import LayoutRequested
from pipelines.errors import UserError
from pipelines.hugging_face.causal_lm import positions_of
from pipelines.hugging_face.export import export
from pipelines.run.plan import TrainRequest, make_plan
from pipelines.run.recipes import load
from pipelines.settings import CheckpointSettings, DataSettings, TrainSettings
from pipelines.training.workload.optimizer import learning_rate

NUM_STEPS = 3
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
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
}


class Case(NamedTuple):
    """A model and the layout under which it is trained."""

    model: str
    layout: str
    microbatch: int = 1

    @property
    def name(self) -> str:
        return f"{self.model} {self.layout}"


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
    Case("qwen2", "pp=2,fsdp=2"),
    Case("mixtral", "tp=2"),
    Case("mixtral", "pp=2,tp=2"),
]


def save_model(folder: Path, name: str) -> Path:
    """A random model, saved by `transformers`."""
    model_folder = folder / name
    if not model_folder.exists():
        kind = "llama" if name == "tied" else name
        torch.manual_seed(1)
        config = CONFIG_MAPPING[kind](**SIZES | MODELS[name])
        AutoModelForCausalLM.from_config(config).save_pretrained(
            model_folder, max_shard_size="50KB"
        )
    return model_folder


def settings_for(model_folder: Path, **changes: object) -> TrainSettings:
    return load(f"hf:{model_folder}").model_copy(
        update={
            "data": DataSettings(source="random", seq_len=16),
            "dtype": "float64",
            "batch": 6,
            "eval_every": 1,
            "eval_samples": 3,
            **changes,
        }
    )


def train_plain_model(
    settings: TrainSettings, num_steps: int
) -> tuple[list[tuple[float, float]], dict]:
    """Train the model with plain `transformers` on the same samples."""
    model, optimizer = plain_causal_lm.load(settings.init_from), settings.optimizer
    data, batches = program_of(settings).workload.train, []
    for step in range(num_steps):
        ids = range(step * settings.batch, (step + 1) * settings.batch)
        batch = data.read(
            [sample_of(settings.seed, sample_id, data.num_samples) for sample_id in ids]
        )
        positions = positions_of(batch.documents)
        batches.append((batch.tokens, batch.targets, positions))
    losses_and_norms = plain_causal_lm.train(
        model,
        batches,
        [learning_rate(optimizer, step) for step in range(1, num_steps + 1)],
        (optimizer.beta1, optimizer.beta2),
        optimizer.weight_decay,
        optimizer.max_grad_norm,
    )
    return losses_and_norms, model.state_dict()


def run_rank(world_rank: int, folder: Path, cases: list[Case]) -> None:
    """The work of one process: train each case that has its rank."""
    torch.set_num_threads(1)
    store = open_file_store(folder, NUM_PROCESSES)
    for case in cases:
        layout = Layout.parse(case.layout)
        if world_rank >= layout.num_workers:
            continue
        program = program_of(settings_for(folder / case.model, microbatch=case.microbatch))
        with formed_groups(layout, store, case.name, world_rank) as groups:
            trained = train(program, groups, NUM_STEPS)
        torch.save(trained._asdict(), folder / f"{case.name}-{world_rank}.pt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all cases, computed by four processes."""
    folder = tmp_path_factory.mktemp("trained")
    for case in CASES:
        save_model(folder, case.model)
    set_forkserver_preload(["pipelines.run.program", "plain_causal_lm"])
    start_processes(run_rank, (folder, CASES), NUM_PROCESSES, start_method="forkserver")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sharded_model_trains_as_plain_transformers(trained: Path, case: Case) -> None:
    assert_equals_plain_loop(trained, case)


def assert_equals_plain_loop(folder: Path, case: Case) -> None:
    layout, settings = Layout.parse(case.layout), settings_for(folder / case.model)
    ranks = [
        Trained(**torch.load(folder / f"{case.name}-{rank}.pt", weights_only=False))
        for rank in range(layout.num_workers)
    ]
    losses_and_norms, weights = train_plain_model(settings, NUM_STEPS)
    losses, norms = zip(*losses_and_norms, strict=True)
    for trained in ranks:
        assert trained.losses == pytest.approx(losses, rel=1e-9)
        assert trained.norms == pytest.approx(norms, rel=1e-9)
        assert trained.num_collectives_in_apply == 0
    for spec in program_of(settings).specs():
        for rank, trained in enumerate(ranks) if spec.kind == "parameter" else ():
            region = region_of(spec, layout, layout.coordinates(rank))
            assert (spec.name in trained.tensors) == (region is not None)
            if region is not None:
                expected_region = models_on_disk.slice_region(weights[spec.name], region)
                torch.testing.assert_close(
                    trained.tensors[spec.name], expected_region, rtol=1e-9, atol=1e-12
                )


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
    "cp": ("llama", "cp=2", "whole sequences"),
    "ep": ("mixtral", "fsdp=2,ep=2", "not distributed"),
    "tied stages": ("tied", "pp=2", "tie_word_embeddings=false"),
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
    "balance loss": (
        {"model_type": "mixtral", "output_router_logits": True},
        "load-balancing loss",
    ),
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
