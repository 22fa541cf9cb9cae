"""`init_from`: a run of any layout starts from a model that transformers has saved."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from harness import run_in_processes
from models_on_disk import (
    CLOSE,
    DENSE,
    MIXTURE,
    TOKENS,
    granite,
    llama,
    load_pretrained,
    our_logits,
    settings_for,
    slice_region,
    their_logits,
    write_run,
)
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from elastic.geometry.layout import Layout
from elastic.geometry.regions import Region
from elastic.geometry.sample_order import batch_ids, sample_of
from elastic.geometry.shard_map import region_of
from pipelines.cli import main
from pipelines.errors import UserError
from pipelines.hugging_face import transformer_from
from pipelines.hugging_face.weights.export import export
from pipelines.run.program import TrainingProgram
from pipelines.settings import TransformerSettings

LAYOUTS = ("dp=2,fsdp=2", "fsdp=3", "fsdp=2,tp=2", "pp=2,tp=2")


def build_program(folder: Path, model: TransformerSettings, **changes: object) -> TrainingProgram:
    settings = settings_for(model, init_from=str(folder), **changes)
    return TrainingProgram(settings.model_dump(mode="json"), device="cpu")


def initial_parameters(program: TrainingProgram) -> dict[str, torch.Tensor]:
    """All parameters at step 0."""
    return {
        spec.name: program.initial(spec, Region.whole(spec.shape))
        for spec in program.specs()
        if spec.kind == "parameter"
    }


@pytest.mark.parametrize("shards", ["50GB", "30KB"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_imported_llama_computes_the_same_logits(
    tmp_path: Path, shards: str, tied: bool, dtype
) -> None:
    llama(tie_word_embeddings=tied).to(dtype).save_pretrained(tmp_path, max_shard_size=shards)
    assert (tmp_path / "model.safetensors").exists() == (shards == "50GB")
    weights = initial_parameters(build_program(tmp_path, DENSE))
    assert {value.dtype for value in weights.values()} == {torch.float32}
    ours = our_logits(DENSE, weights, TOKENS)
    assert ours.std() > 0.5
    torch.testing.assert_close(
        ours, their_logits(load_pretrained(tmp_path, torch.float32), TOKENS), **CLOSE
    )


def test_imported_mixture_computes_the_same_logits(tmp_path: Path) -> None:
    model = granite()
    model.save_pretrained(tmp_path)
    ours = our_logits(MIXTURE, initial_parameters(build_program(tmp_path, MIXTURE)), TOKENS)
    torch.testing.assert_close(ours, their_logits(model, TOKENS), **CLOSE)


@pytest.mark.parametrize("layout", [*LAYOUTS, "fsdp=2,ep=2"])
def test_each_rank_reads_only_its_regions(tmp_path: Path, layout: str) -> None:
    (granite if "ep" in layout else llama)().save_pretrained(tmp_path, max_shard_size="30KB")
    settings = MIXTURE if "ep" in layout else DENSE
    program = build_program(tmp_path, settings.model_copy(update={"vocab_size": 79}))
    parameters, mesh_layout = initial_parameters(program), Layout.parse(layout)
    for world_rank in range(mesh_layout.num_workers):
        for spec in program.specs():
            region = region_of(spec, mesh_layout, mesh_layout.coordinates(world_rank))
            if region and spec.kind == "parameter":
                assert torch.equal(
                    program.initial(spec, region), slice_region(parameters[spec.name], region)
                )


def test_only_parameters_come_from_the_folder(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    program = build_program(tmp_path, DENSE)
    optimizer_specs = [spec for spec in program.specs() if spec.kind == "optimizer"]
    assert optimizer_specs
    assert not any(
        program.initial(spec, Region.whole(spec.shape)).any() for spec in optimizer_specs
    )


def test_added_tokens_raise_the_loss_within_the_bound(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    larger = DENSE.model_copy(update={"vocab_size": 79})
    weights = initial_parameters(build_program(tmp_path, larger))
    for name in ("embedding.weight", "head.weight"):
        mean = weights[name][:70].double().mean(0).float()
        torch.testing.assert_close(weights[name][70:], mean.expand(9, -1))
    known_logits = our_logits(larger, weights, TOKENS)[..., :70]
    torch.testing.assert_close(known_logits, their_logits(model, TOKENS), **CLOSE)
    targets = TOKENS.roll(1).flatten()
    before = cross_entropy(their_logits(model, TOKENS).flatten(0, 1), targets, reduction="none")
    after = our_logits(larger, weights, TOKENS).flatten(0, 1)
    growth = cross_entropy(after, targets, reduction="none") - before
    assert growth.min() > 0 and growth.max() <= math.log(1 + 9 / 70)


@pytest.mark.parametrize("build_model", [llama, granite])
def test_import_of_an_export_is_bitwise_equal(tmp_path: Path, build_model) -> None:
    build_model().save_pretrained(tmp_path / "theirs")
    settings = transformer_from(tmp_path / "theirs")
    weights = initial_parameters(build_program(tmp_path / "theirs", settings))
    write_run(tmp_path, settings_for(settings), Layout.parse("dp=2,fsdp=2"), weights)
    export("first", tmp_path, tmp_path / "back", shard_bytes=10_000, window_bytes=3000)
    imported = initial_parameters(build_program(tmp_path / "back", settings))
    assert all(torch.equal(imported[name], value) for name, value in weights.items())
    exported_tensors = {}
    for file in (tmp_path / "back").glob("*.safetensors"):
        exported_tensors |= load_file(file)
    original_tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    assert exported_tensors.keys() == original_tensors.keys()
    assert all(
        torch.equal(exported_tensors[name], value) for name, value in original_tensors.items()
    )


def test_transformer_from_reads_the_settings_of_a_folder(tmp_path: Path) -> None:
    for build_model, expected in ((llama, DENSE), (granite, MIXTURE)):
        build_model().save_pretrained(tmp_path / build_model.__name__)
        settings = transformer_from(tmp_path / build_model.__name__)
        assert settings == expected.model_copy(update={"hidden_dim": settings.hidden_dim})


def test_folder_of_transformers_4_has_the_same_settings(tmp_path: Path) -> None:
    """Its `config.json` has another name for the rotary base, and omits defaults."""
    llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("rope_parameters", "dtype", "head_dim", "attention_bias", "mlp_bias"):
        config.pop(key)
    config |= {"rope_theta": 500.0, "rope_scaling": None, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert transformer_from(tmp_path) == DENSE


def test_first_loss_of_two_workers_is_the_loss_of_the_model(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "theirs")
    settings = settings_for(DENSE, init_from=str(tmp_path / "theirs"))
    run = run_in_processes(tmp_path / "run", settings, 2, layout="fsdp=2")
    assert run.stopped.outcome == "completed"
    data = TrainingProgram(settings.model_dump(mode="json")).workload.train
    ids = batch_ids(1, settings.batch)
    batch = data.read([sample_of(settings.seed, sample_id, data.num_samples) for sample_id in ids])
    assert batch.documents is None or (batch.documents == batch.documents[:, :1]).all()
    logits = their_logits(model, batch.tokens).flatten(0, 1)
    assert run.losses()[1] == pytest.approx(cross_entropy(logits, batch.targets.flatten()).item())


def change_config(folder: Path, **fields: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def remove_tensor(folder: Path, name: str) -> Path:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    return folder


def change_tensor(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors[name]
    num_rows = len(tensor) - (dtype == torch.float32)
    save_file(tensors | {name: tensor[:num_rows].clone().to(dtype)}, folder / "model.safetensors")
    return folder


def rename_weights(folder: Path) -> Path:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return folder


def truncate_weights(folder: Path) -> Path:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-5])
    return folder


Q_PROJ = "model.layers.2.self_attn.q_proj.weight"
ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0}
REFUSED = {
    "no folder": (lambda folder: folder / "nowhere", "there is no such folder"),
    "no config": (lambda folder: [folder, (folder / "config.json").unlink()][0], "config.json"),
    "another width": (
        lambda folder: change_config(folder, hidden_size=96, head_dim=16),
        "model.dim: 96 -> 48",
    ),
    "more layers": (
        lambda folder: change_config(folder, num_hidden_layers=4),
        "model.num_layers: 4 -> 3",
    ),
    "other heads": (
        lambda folder: change_config(folder, num_key_value_heads=3),
        "model.num_kv_heads: 3 -> 2",
    ),
    "more tokens": (
        lambda folder: change_config(folder, vocab_size=71),
        "model.vocab_size: 71 -> 70",
    ),
    "another kind": (
        lambda f: change_config(f, model_type="gpt2", hidden_size=0),
        "model_type=gpt2",
    ),
    "scaled angles": (
        lambda folder: change_config(folder, rope_parameters=ROPE),
        "rope_type=llama3",
    ),
    "biases": (lambda folder: change_config(folder, attention_bias=True), "attention_bias=True"),
    "a field is missing": (lambda folder: change_config(folder, hidden_size=None), "dim: "),
    "only a pickle": (rename_weights, "save_pretrained"),
    "a tensor is missing": (
        lambda folder: remove_tensor(folder, Q_PROJ),
        f"has no tensor {Q_PROJ}",
    ),
    "untied without a head": (
        lambda f: remove_tensor(f, "lm_head.weight"),
        "has no tensor lm_head.weight",
    ),
    "another shape": (lambda folder: change_tensor(folder, Q_PROJ), "has shape (47, 48), but its"),
    "quantised": (lambda f: change_tensor(f, Q_PROJ, torch.int8), "only F64, F32, BF16, F16"),
    "truncated": (truncate_weights, "model.safetensors"),
}


RECIPE = """
import sys
sys.path.append({folder!r})
from models_on_disk import DENSE, settings_for

def recipe():
    return settings_for(DENSE)
"""


@pytest.mark.parametrize("name", REFUSED)
def test_unsuitable_model_folder_is_refused_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The error comes before a run's folder is created or data are prepared."""
    change_folder, message = REFUSED[name]
    llama().save_pretrained(tmp_path / "theirs")
    capsys.readouterr()
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(folder=str(Path(__file__).parent)))
    arguments = [f"{recipe}:recipe", "--storage", str(tmp_path / "runs"), "--run-name", "second"]
    arguments += ["--set", f"init_from={change_folder(tmp_path / 'theirs')}", "--workers", "1"]
    monkeypatch.setattr(sys, "argv", ["elastic", "train", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and message in line, line
    assert not (tmp_path / "runs").exists()


def test_init_from_is_refused_for_an_mlp(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["elastic", "train", "mlp", "--set", "init_from=somewhere"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "cannot start from a folder" in capsys.readouterr().err


def test_unsupported_feature_of_granite_is_refused(tmp_path: Path) -> None:
    granite(residual_multiplier=0.22).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"residual_multiplier=0\.22"):
        transformer_from(tmp_path)
