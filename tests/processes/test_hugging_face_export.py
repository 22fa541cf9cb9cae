"""`elastic export`: transformers loads the result and computes the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from models_on_disk import (
    CLOSE,
    DENSE,
    MIXTURE,
    ONLY_ROUTED,
    SEQ_LEN,
    TOKENS,
    load_pretrained,
    our_logits,
    random_weights,
    settings_for,
    their_logits,
    write_run,
)
from safetensors.torch import load_file
from transformers import AutoTokenizer

from elastic.geometry.layout import Layout
from pipelines.cli import main
from pipelines.data import prepare
from pipelines.data.corpus import find_corpus
from pipelines.data.tokens import ByteTokenizer, find_tokenizer
from pipelines.hugging_face.weights.export import export
from pipelines.run.recipes import mlp
from pipelines.settings import DataSettings
from pipelines.training.models.transformer import Transformer

LAYOUTS = ("dp=2,fsdp=2", "fsdp=3", "fsdp=2,tp=2", "pp=2,tp=2")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)


def export_run(tmp_path: Path, *arguments: str) -> Path:
    """Export from the command line, to the default folder."""
    sys.argv = ["elastic", "export", "first", "--storage", str(tmp_path), *arguments]
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    return tmp_path / "first-hf"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exported_dense_model_computes_the_same_logits(tmp_path: Path, layout: str) -> None:
    weights = random_weights(DENSE)
    write_run(tmp_path, settings_for(DENSE), Layout.parse(layout), weights)
    model = load_pretrained(export_run(tmp_path))
    assert type(model).__name__ == "LlamaForCausalLM" and model.dtype == torch.float32
    expected = our_logits(DENSE, weights, TOKENS)
    assert expected.std() > 0.5
    torch.testing.assert_close(their_logits(model, TOKENS), expected, **CLOSE)


@pytest.mark.parametrize("settings", [MIXTURE, ONLY_ROUTED], ids=["shared", "only routed"])
def test_exported_mixture_computes_the_same_logits(tmp_path: Path, settings) -> None:
    weights = random_weights(settings)
    write_run(tmp_path, settings_for(settings), Layout.parse("fsdp=2,ep=2"), weights)
    model = load_pretrained(export_run(tmp_path))
    assert type(model).__name__ == "GraniteMoeSharedForCausalLM"
    expected = our_logits(settings, weights, TOKENS)
    torch.testing.assert_close(their_logits(model, TOKENS), expected, **CLOSE)


@pytest.mark.parametrize("settings", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("window_bytes", [1, 3000, 1 << 20])
def test_files_and_windows_of_any_size_have_the_same_contents(
    tmp_path, settings, window_bytes
) -> None:
    write_run(tmp_path, settings_for(settings), Layout(fsdp=3), random_weights(settings))
    expected_tensors = load_file(export_run(tmp_path) / "model.safetensors")
    export("first", tmp_path, Path("cut"), shard_bytes=20_000, window_bytes=window_bytes)
    index = json.loads(Path("cut", "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected_tensors.keys()
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for tensor in expected_tensors.values()
    )
    for file in set(index["weight_map"].values()):
        tensors = load_file(Path("cut") / file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 20_000
        for name, tensor in tensors.items():
            assert index["weight_map"][name] == file and torch.equal(tensor, expected_tensors[name])
    for name, tensor in load_pretrained(tmp_path / "cut").state_dict().items():
        assert torch.equal(tensor, load_pretrained(tmp_path / "first-hf").state_dict()[name])


def test_bfloat16_is_the_rounded_float32(tmp_path: Path) -> None:
    weights = random_weights(DENSE)
    write_run(tmp_path, settings_for(DENSE), Layout(), weights)
    model = load_pretrained(export_run(tmp_path, "--dtype", "bfloat16"))
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, weights["head.weight"].bfloat16())


def test_float64_is_exported_unchanged(tmp_path: Path) -> None:
    weights = {name: value.double() for name, value in random_weights(DENSE).items()}
    write_run(tmp_path, settings_for(DENSE, dtype="float64"), Layout(), weights)
    model = load_pretrained(export_run(tmp_path))
    assert torch.equal(model.lm_head.weight, weights["head.weight"])
    module = Transformer(DENSE).double()
    module.load_state_dict(weights)
    theirs, ours = their_logits(model, TOKENS), module(TOKENS)
    torch.testing.assert_close(theirs, ours, rtol=0.0, atol=1e-6)  # their angles are float32


def test_export_takes_the_newest_or_the_requested_step(tmp_path: Path) -> None:
    for step in (3, 12, 9):
        write_run(tmp_path, settings_for(DENSE), Layout(), random_weights(DENSE, step), step=step)
    for arguments, step in (((), 12), (("--step", "9"), 9)):
        tensors = load_file(export_run(tmp_path, *arguments) / "model.safetensors")
        assert torch.equal(tensors["lm_head.weight"], random_weights(DENSE, step)["head.weight"])
        shutil.rmtree(tmp_path / "first-hf")


def prepare_text(tmp_path: Path, tokenizer: str, text: str) -> Path:
    (tmp_path / "text.txt").write_text(text)
    folder = tmp_path / "tokens"
    prepare(find_corpus(str(tmp_path / "text.txt")), folder, find_tokenizer(tokenizer), 0.0)
    return folder


def write_text_run(tmp_path: Path, tokenizer: str, vocab_size: int) -> None:
    folder = prepare_text(tmp_path, tokenizer, "to be or not to be\n" * 40)
    model = DENSE.model_copy(update={"vocab_size": vocab_size})
    data = DataSettings(source=str(folder), tokenizer=tokenizer, seq_len=SEQ_LEN)
    settings = settings_for(model).model_copy(update={"data": data})
    write_run(tmp_path, settings, Layout(), random_weights(model), data_folder=folder)


def test_the_byte_tokenizer_is_exported_for_transformers(tmp_path: Path) -> None:
    write_text_run(tmp_path, "bytes", 264)
    folder = export_run(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(folder), ByteTokenizer()
    for text in ("to be", " \n\tçüß 東京 \x00\x7f\U0001f600", "", "a  b\r\n"):
        assert theirs(text).input_ids == ours.encode([text])[0].tolist()
        assert theirs.decode(theirs(text).input_ids) == text
    for tokens in (range(256), [0xE6, 0x9D, 65]):
        assert theirs.decode(list(tokens)) == ours.decode(list(tokens))
    assert (theirs.eos_token_id, theirs.bos_token_id) == (256, None)
    model = load_pretrained(folder)
    assert model.generation_config.eos_token_id == 256
    tokens = theirs("to be", return_tensors="pt")
    assert model.generate(**tokens, max_new_tokens=4, do_sample=False).shape[1] <= 9


def test_a_tokenizer_file_is_exported_without_disabled_features(tmp_path: Path) -> None:
    words = {"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 4, "<s>": 5}
    file = tmp_path / "words.json"
    file.write_text(json.dumps(WORDS | {"model": WORDS["model"] | {"vocab": words}}))
    write_text_run(tmp_path, str(file), 70)
    tokenizer = AutoTokenizer.from_pretrained(export_run(tmp_path))
    assert tokenizer("to be or not").input_ids == [1, 2, 3, 4]
    assert tokenizer.eos_token_id == 6, "the id after the vocabulary separated the documents"


WORDS = {
    "version": "1.0",
    "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [5], "tokens": ["<s>"]}},
    },
    "decoder": None,
    "model": {"type": "WordLevel", "unk_token": "[UNK]"},
}


def test_a_missing_tokenizer_is_reported(tmp_path: Path, capsys) -> None:
    write_text_run(tmp_path, "bytes", 264)
    shutil.rmtree(tmp_path / "tokens")
    folder = export_run(tmp_path)
    assert "no tokenizer: " in capsys.readouterr().out
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]


def refusal_of(capsys, *arguments: str) -> str:
    sys.argv = ["elastic", "export", *arguments]
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    assert ended.value.code == 2, output
    [line] = output.err.splitlines()
    assert not output.out and not list(Path().glob("*.partial*"))
    return line


def test_export_of_an_unsuitable_run_is_refused_in_one_line(tmp_path: Path, capsys) -> None:
    write_run(tmp_path, settings_for(DENSE), Layout(), random_weights(DENSE))
    storage = ("--storage", str(tmp_path))
    line = refusal_of(capsys, "second", *storage)
    assert "no run 'second'" in line and "its runs are: first" in line
    assert "no checkpoint of step 4; steps with one: 3" in refusal_of(
        capsys, "first", *storage, "--step", "4"
    )
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("in the way")
    assert "exists already" in refusal_of(capsys, "first", *storage, "--out", "taken")
    assert "cannot be written" in refusal_of(capsys, "first", *storage, "--out", "taken/file/x")
    shutil.rmtree(tmp_path / "first" / "checkpoints")
    assert "has no complete checkpoint" in refusal_of(capsys, "first", *storage)
    recipe = {"settings": mlp().model_dump(mode="json"), "data_folder": None}
    write_run(tmp_path, settings_for(DENSE), Layout(), random_weights(DENSE), name="mlp")
    (tmp_path / "mlp" / "recipe.json").write_text(json.dumps(recipe))
    assert "only transformers can be exported" in refusal_of(capsys, "mlp", *storage)


def test_export_of_a_damaged_checkpoint_leaves_no_files(tmp_path: Path, capsys) -> None:
    run = write_run(tmp_path, settings_for(DENSE), Layout(fsdp=2), random_weights(DENSE))
    part = next(run.glob("checkpoints/*/part-w1.safetensors"))
    content = bytearray(part.read_bytes())
    content[:8] = (len(content) * 2).to_bytes(8, "little")
    part.write_bytes(content)
    assert "header does not match" in refusal_of(capsys, "first", "--storage", str(tmp_path))
    assert not (tmp_path / "first-hf").exists()


LARGE = DENSE.model_copy(update={"vocab_size": 40_000, "dim": 480, "num_layers": 1})
EXPORT = """
import sys
from pathlib import Path
from pipelines.hugging_face.weights.export import export

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

storage = Path(sys.argv[1])
export("small", storage)
before = peak_bytes()
print("begins", flush=True)
export("first", storage, window_bytes=1 << 23)
print(peak_bytes() - before)
"""


@pytest.fixture(scope="module")
def large_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    storage = tmp_path_factory.mktemp("large")
    write_run(storage, settings_for(DENSE), Layout(), random_weights(DENSE), name="small")
    write_run(storage, settings_for(LARGE), Layout(fsdp=3), random_weights(LARGE))
    return storage


@pytest.fixture
def exporting(large_runs: Path, tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A process that exports both runs to the test's folder, with one allocator arena: which thread
    reads in which arena is chance, and their caches are not of this project."""
    child = subprocess.Popen(
        [sys.executable, "-c", EXPORT, str(large_runs)],
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    yield child
    child.kill()
    child.communicate()
    shutil.rmtree(tmp_path)


def test_memory_of_an_export_is_bounded_by_its_window(
    exporting: subprocess.Popen, tmp_path: Path
) -> None:
    """A tensor has 77 MB, a window 8 MB; the limit includes mapped files and allocator caches."""
    output, _ = exporting.communicate(timeout=100)
    assert exporting.returncode == 0
    assert (tmp_path / "first-hf" / "model.safetensors").stat().st_size > 150_000_000
    assert int(output.splitlines()[-1]) < 70_000_000


def test_killed_export_leaves_only_a_partial_folder(
    exporting: subprocess.Popen, tmp_path: Path
) -> None:
    assert exporting.stdout.readline() == "begins\n"
    partial = tmp_path / f"first-hf.partial-{exporting.pid}"
    deadline = time.monotonic() + 60
    while not (partial / "model.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    exporting.kill()
    exporting.wait()
    assert partial.exists() and not (tmp_path / "first-hf").exists()
