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
from harness import run_plainly
from ranks import formed, open_file_store
from run_checks import assert_nothing_redone
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
from pipelines.hugging_face.causal_lm import positions_of
from pipelines.hugging_face.export import export
from pipelines.run.plan import TrainRequest, make_plan
from pipelines.run.recipes import load
from pipelines.settings import CheckpointSettings, DataSettings, TrainSettings
from pipelines.settings.errors import UserError
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


def written(folder: Path, name: str) -> Path:
    """A random model, saved by `transformers`."""
    place = folder / name
    if not place.exists():
        kind = "llama" if name == "tied" else name
        torch.manual_seed(1)
        config = CONFIG_MAPPING[kind](**SIZES | MODELS[name])
        AutoModelForCausalLM.from_config(config).save_pretrained(place, max_shard_size="50KB")
    return place


def settings_for(place: Path, **changes: object) -> TrainSettings:
    return load(f"hf:{place}").model_copy(
        update={
            "data": DataSettings(source="random", seq_len=16),
            "dtype": "float64",
            "batch": 6,
            "eval_every": 1,
            "eval_samples": 3,
            **changes,
        }
    )


def expected(settings: TrainSettings, num_steps: int) -> tuple[list[tuple[float, float]], dict]:
    """The results of plain `transformers` on the same samples."""
    model, optimizer = plain_causal_lm.load(settings.init_from), settings.optimizer
    data, batches = program_of(settings).workload.train, []
    for step in range(num_steps):
        ids = range(step * settings.batch, (step + 1) * settings.batch)
        batch = data.read([sample_of(settings.seed, one, data.num_samples) for one in ids])
        positions = positions_of(batch.documents)
        batches.append((batch.tokens, batch.targets, positions))
    seen = plain_causal_lm.train(
        model,
        batches,
        [learning_rate(optimizer, step) for step in range(1, num_steps + 1)],
        (optimizer.beta1, optimizer.beta2),
        optimizer.weight_decay,
        optimizer.max_grad_norm,
    )
    return seen, model.state_dict()


def run_rank(world_rank: int, folder: Path, cases: list[Case]) -> None:
    """The work of one process: train each case that has its rank."""
    torch.set_num_threads(1)
    store = open_file_store(folder, NUM_PROCESSES)
    for case in cases:
        layout = Layout.parse(case.layout)
        if world_rank >= layout.num_workers:
            continue
        program = program_of(settings_for(folder / case.model, microbatch=case.microbatch))
        with formed(layout, store, case.name, world_rank) as groups:
            trained = train(program, groups, NUM_STEPS)
        torch.save(trained._asdict(), folder / f"{case.name}-{world_rank}.pt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all cases, computed by four processes."""
    folder = tmp_path_factory.mktemp("trained")
    for case in CASES:
        written(folder, case.model)
    set_forkserver_preload(["pipelines.run.program", "plain_causal_lm"])
    start_processes(run_rank, (folder, CASES), NUM_PROCESSES, start_method="forkserver")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_model_trains_as_plain_transformers_does(trained: Path, case: Case) -> None:
    assert_trained_plainly(trained, case)


def assert_trained_plainly(folder: Path, case: Case) -> None:
    layout, settings = Layout.parse(case.layout), settings_for(folder / case.model)
    ranks = [
        Trained(**torch.load(folder / f"{case.name}-{rank}.pt", weights_only=False))
        for rank in range(layout.num_workers)
    ]
    seen, weights = expected(settings, NUM_STEPS)
    losses, norms = zip(*seen, strict=True)
    for trained in ranks:
        assert trained.losses == pytest.approx(losses, rel=1e-9)
        assert trained.norms == pytest.approx(norms, rel=1e-9)
        assert trained.num_collectives_in_apply == 0
    for spec in program_of(settings).specs():
        for rank, trained in enumerate(ranks) if spec.kind == "parameter" else ():
            region = region_of(spec, layout, layout.coordinates(rank))
            assert (spec.name in trained.tensors) == (region is not None)
            if region is not None:
                whole = models_on_disk.cut(weights[spec.name], region)
                torch.testing.assert_close(trained.tensors[spec.name], whole, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_run_is_killed_resharded_and_exported(tmp_path: Path) -> None:
    """`transformers` loads the export."""
    place = written(tmp_path, "qwen3")
    settings = settings_for(place, steps=14, eval_every=0, checkpoint=CheckpointSettings(every=7))
    kill = Fault("kill", "w3", 4, "compute")
    due = ((8, LayoutRequested("other", TargetLayout.parse("dp=2,tp=2"))),)
    run = run_plainly(tmp_path / "run", settings, 4, layout="dp=2,fsdp=2", due=due, faults=(kill,))
    assert run.stopped.outcome == "completed"
    assert_nothing_redone(run)
    assert "tp=2" in run.told("Resume")[-1]["layout"], "of dp as many as are there"
    seen, weights = expected(settings, settings.steps)
    assert [run.losses()[n] for n in range(1, 15)] == pytest.approx(
        [loss for loss, _ in seen], rel=1e-9
    )
    (run.folder / "recipe.json").write_text(
        json.dumps({"settings": settings.model_dump(mode="json"), "data_folder": None})
    )
    export("run", tmp_path, tmp_path / "out", shard_bytes=50_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    stored = models_on_disk.loaded(tmp_path / "out", torch.float64).state_dict()
    for name, weight in weights.items():
        torch.testing.assert_close(stored[name], weight, rtol=1e-9, atol=1e-12)


def test_a_run_starts_from_the_folder_or_from_values_of_transformers(tmp_path: Path) -> None:
    """With any tensor names in the files; a config alone gives the same values each time."""
    place = written(tmp_path, "mixtral")
    program = program_of(settings_for(place))
    assert not program.pretrained.is_direct, "experts are stored one by one"
    theirs = plain_causal_lm.load(place).state_dict()
    parameters = [spec for spec in program.specs() if spec.kind == "parameter"]
    for spec in parameters:
        value = program.initial(spec, Region.whole(spec.shape))
        assert torch.equal(value, theirs[spec.name])
    drawn = [program_of(settings_for(place, init_from=None)) for _ in range(2)]
    for spec in parameters:
        first, again = (one.initial(spec, Region.whole(spec.shape)) for one in drawn)
        assert torch.equal(first, again)
        std = 0.0 if spec.name.endswith("norm.weight") else 0.12
        assert first.std().item() == pytest.approx(std, abs=0.02)
    assert torch.equal(
        drawn[0].initial(parameters[-2], Region.whole((48,))), torch.ones(48).double()
    )


REFUSED = {
    "cp": ("llama", "cp=2", "whole sequences"),
    "ep": ("mixtral", "fsdp=2,ep=2", "not distributed"),
    "tied stages": ("tied", "pp=2", "tie_word_embeddings=false"),
    "odd heads": ("qwen2", "tp=4", "tp=4 does not divide 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_axis_of_a_model_is_refused_with_the_reason(
    tmp_path: Path, name: str
) -> None:
    model, layout, told = REFUSED[name]
    place = written(tmp_path, model)
    asked = TrainRequest(
        f"hf:{place}", storage=str(tmp_path), workers="4", layout=layout, data="random"
    )
    with pytest.raises(UserError, match=told):
        make_plan(asked, 0)


UNFIT = {
    "nothing there": (None, "nothing is downloaded"),
    "unknown kind": ({"model_type": "lama"}, "unknown to the installed"),
    "no language model": ({"model_type": "vit"}, "not a causal language model"),
    "quantised": ({"model_type": "llama", "quantization_config": {"a": 1}}, "quantization_config"),
    "bad value": ({"model_type": "llama", "hidden_size": 50, "num_attention_heads": 4}, "multiple"),
    "balance loss": (
        {"model_type": "mixtral", "output_router_logits": True},
        "load-balancing loss",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_config_that_cannot_be_trained_is_refused(tmp_path: Path, name: str) -> None:
    fields, told = UNFIT[name]
    file = tmp_path / "config.json"
    if fields is not None:
        file.write_text(json.dumps(fields))
    with pytest.raises(UserError, match=told) as refused:
        load(f"hf:{file}")
    assert "\n" not in str(refused.value)
