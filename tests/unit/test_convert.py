"""`elastic convert`: each key of a DeepSpeed configuration is translated or reported."""

from __future__ import annotations

import json
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_pages import ROOT, blocks
from rich.console import Console

from elastic.geometry.target_layout import TargetLayout
from pipelines.cli import main
from pipelines.migration.conversion import Target
from pipelines.migration.convert import Converted, convert
from pipelines.run.in_process import train_in_process
from pipelines.run.plan import TrainRequest
from pipelines.settings import TrainSettings
from pipelines.settings.overrides import override

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "from-deepspeed.md"
PUBLISHED: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "steps_per_print": 2000,
    "gradient_clipping": 0.5,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.8, 0.98], "eps": 1e-6, "weight_decay": 0.01},
    },
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": 20, "total_num_steps": 200, "cos_min_ratio": 0.05},
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "hysteresis": 2},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "activation_checkpointing": {"partition_activations": True, "profile": False},
    "flops_profiler": {"enabled": True, "profile_step": 3, "top_modules": 1},
    "wandb": {"enabled": True, "project": "x"},
    "tensorboard": {"enabled": False, "output_path": "logs"},
}
VALUES = {
    "batch": 64,
    "microbatch": 2,
    "dtype": "bfloat16",
    "offload": True,
    "activation_checkpointing": "full",
}
OPTIMIZER = {
    "lr": 3e-4,
    "beta1": 0.8,
    "beta2": 0.98,
    "eps": 1e-6,
    "weight_decay": 0.01,
    "max_grad_norm": 0.5,
    "warmup_steps": 20,
    "decay_steps": 200,
    "min_lr_ratio": 0.05,
}


def convert_values(
    folder: Path, values: Any, num_gpus: int | None = None, target: Target = "settings"
) -> Converted:
    file = folder / "ds_config.json"
    file.write_text(json.dumps(values))
    return convert(str(file), num_gpus, target)


def changes_of(converted: Converted) -> list[str]:
    words = shlex.split(converted.text)
    return [value for option, value in zip(words[::2], words[1::2], strict=True) if "set" in option]


def options_of(converted: Converted) -> dict[str, str]:
    words = shlex.split(converted.text)
    return dict(zip(words[::2], words[1::2], strict=True))


def line_of(converted: Converted, key: str) -> str:
    [line] = [line for line in converted.lines if line.startswith(f"{key}: ")]
    return line.removeprefix(f"{key}: ")


def test_published_configuration_loads_as_settings_with_its_values(tmp_path: Path) -> None:
    converted = convert_values(tmp_path, PUBLISHED)
    settings = override(TrainSettings(), changes_of(converted))
    assert {name: getattr(settings, name) for name in VALUES} == VALUES
    assert settings.optimizer.model_dump() == OPTIMIZER
    options = options_of(converted)
    assert options["--workers"] == "8" and options["--profile"] == "steps=3:3"
    layout = TargetLayout.parse(options["--layout"])
    assert (layout.fsdp, layout.zero) == (8, 2)


@pytest.mark.parametrize("target", ["settings", "loop"])
def test_each_key_has_exactly_one_line(tmp_path: Path, target: Target) -> None:
    values = {**PUBLISHED, "surprise": {"a": [1], "b": {}}, "a\nb": None}
    lines = convert_values(tmp_path, values, target=target).lines
    names = [line.partition(": ")[0] for line in lines]
    assert len(names) == len(set(names)) and not [line for line in lines if "\n" in line]
    assert set(names) == {name.replace("\n", "\\n") for name in full_names(values)}


def full_names(values: dict[str, Any], prefix: str = "") -> list[str]:
    names = []
    for key, value in values.items():
        nested = full_names(value, f"{prefix}{key}.") if isinstance(value, dict) else []
        names += nested or [f"{prefix}{key}"]
    return names


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("steps_per_print", 10, "not needed because the display"),
        ("wall_clock_breakdown", True, "not needed because each step's phases"),
        ("sparse_gradients", True, "no counterpart: gradients are dense"),
        ("data_types", {"grad_accum_dtype": "fp32"}, "not needed because gradients"),
        ("data_types", {"param_dtype": "bf16"}, "no counterpart: dtype applies"),
        ("sparse_gradients", False, "not needed because it is off"),
        ("gradiant_clipping", 1.0, "unknown, without effect; similar: gradient_clipping"),
        ("bananas", 1, "unknown, without effect"),
    ],
)
def test_keys_without_translation_are_reported(
    tmp_path: Path, key: str, value: Any, line: str
) -> None:
    converted = convert_values(tmp_path, {**PUBLISHED, key: value})
    [name] = full_names({key: value})
    assert line_of(converted, name).startswith(line)
    assert converted.text == convert_values(tmp_path, PUBLISHED).text


def test_auto_of_hugging_face_is_reported_and_has_no_value(tmp_path: Path) -> None:
    values = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
    }
    converted = convert_values(tmp_path, values)
    names = {change.partition("=")[0] for change in changes_of(converted)}
    assert names == {f"optimizer.{name}" for name in ("beta1", "beta2", "eps", "weight_decay")}
    assert options_of(converted)["--layout"] == "zero=3"
    assert line_of(converted, "zero_optimization.reduce_bucket_size").startswith("not needed")
    for key in ("train_batch_size", "optimizer.params.lr", "bf16.enabled"):
        assert line_of(converted, key).startswith("no value: Hugging Face's Trainer")
    assert "warmup_num_steps" in line_of(converted, "scheduler.type")


@pytest.mark.parametrize(
    ("values", "num_gpus", "batch", "microbatch"),
    [
        ({"train_batch_size": 64}, 4, 64, 16),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 4, 64, 8),
        ({"train_micro_batch_size_per_gpu": 4}, 2, 8, 4),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, 2, 24, 4),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, None, 64, 4),
        (
            {"train_micro_batch_size_per_gpu": 4, "tensor_parallel": {"autotp_size": 2}},
            8, 16, 4,
        ),
    ],
)  # fmt: skip
def test_batch_is_that_of_deepspeed(
    tmp_path: Path, values: Any, num_gpus: int | None, batch: int, microbatch: int
) -> None:
    settings = override(TrainSettings(), changes_of(convert_values(tmp_path, values, num_gpus)))
    assert (settings.batch, settings.microbatch) == (batch, microbatch)


def test_loop_without_tensor_parallelism_keeps_the_batch(tmp_path: Path) -> None:
    values = {"train_micro_batch_size_per_gpu": 4, "tensor_parallel": {"autotp_size": 2}}
    converted = convert_values(tmp_path, values, 8, "loop")
    assert "MICROBATCH = 4\nNUM_MICROBATCHES = 4\n" in converted.text
    assert "--workers 8 --layout dp=8" in converted.text
    assert line_of(converted, "tensor_parallel.autotp_size").startswith("no counterpart")


MISTAKES = {
    "not JSON": ('{"a": 1,}', "not JSON at line 1, column"),
    "a list": ("[1]", "must be a JSON object"),
    "a key twice": ('{"a": 1, "a": 2}', "the key a occurs twice"),
    "a word as batch": ('{"train_batch_size": "many"}', "must be a number"),
    "a fraction as batch": ('{"train_batch_size": 1.5}', "must be a whole number"),
    "no batch": ('{"train_batch_size": 0}', "must be at least 1"),
    "stage 7": ('{"zero_optimization": {"stage": 7}}', "must be 0, 1, 2 or 3"),
    "a switch that is a word": ('{"bf16": {"enabled": "yes"}}', "must be true or false"),
    "both formats": ('{"bf16": {"enabled": true}, "fp16": {"enabled": true}}', "contradicts"),
    "unknown GPUs": ('{"train_micro_batch_size_per_gpu": 4}', "add --world-size N"),
    "contradiction": (
        '{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}',
        "must be a multiple of",
    ),
    "no length": (
        '{"scheduler": {"type": "WarmupDecayLR", "params": {}}}',
        "WarmupDecayLR needs total_num_steps",
    ),
    "an infinite rate": (
        '{"optimizer": {"type": "Adam", "params": {"lr": Infinity}}}',
        "must be finite",
    ),
    "a rate below 0": ('{"optimizer": {"type": "Adam", "params": {"lr": -1}}}', "greater than 0"),
    "a number of 5000 digits": ('{"train_batch_size": ' + "9" * 5000 + "}", "integer string"),
    "a number beyond floats": ('{"gradient_clipping": ' + "9" * 400 + "}", "must be finite"),
    "an ambiguous key": ('{"bf16.enabled": true, "bf16": {"enabled": true}}', "with a dot"),
    "one beta": ('{"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}', "two numbers"),
}


@pytest.mark.parametrize("text, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_refused_in_one_line(
    text: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "ds_config.json").write_text(text)
    assert call(monkeypatch, "convert", str(tmp_path / "ds_config.json")) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_missing_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "convert", "nowhere.json") == 2
    assert "there is no such file" in capsys.readouterr().err


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["elastic", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


RATES = {
    "WarmupLR": (
        {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-3, "warmup_num_steps": 10},
        [1e-4, 1e-4, 0.000370926996097583, 0.0009588182584953923, 0.001, 0.001],
    ),
    "WarmupDecayLR": (
        {"warmup_num_steps": 7, "total_num_steps": 30, "warmup_type": "linear"},
        [0.0, 0.0, 0.00014285714285714287, 0.0009565217391304348, 0.0009130434782608695, 0.0],
    ),
    "WarmupCosineLR": (
        {
            "warmup_min_ratio": 0.2,
            "warmup_num_steps": 5,
            "total_num_steps": 25,
            "cos_min_ratio": 0.1,
        },
        [0.0, 0.0004, 0.001089082492917429, 0.0018281152949374527, 0.0017363961030678928, 0.0002],
    ),
}  # fmt: skip
STEPS = (0, 1, 2, 9, 10, 39)
"""Steps counted from 0. DeepSpeed 0.19.8 computed the rates, at an optimizer's rate of 2e-3."""


@pytest.mark.parametrize("kind", RATES)
def test_schedule_of_a_loop_is_that_of_deepspeed(kind: str, tmp_path: Path) -> None:
    params, expected = RATES[kind]
    module = load_module(
        tmp_path,
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
            "scheduler": {"type": kind, "params": params},
        },
    )
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = module["make_optimizer"]([parameter])
    scheduler = module["make_scheduler"](optimizer)
    rates = []
    for _ in range(40):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert [rates[step] for step in STEPS] == pytest.approx(expected, rel=1e-12)


def load_module(folder: Path, values: Any) -> dict[str, Any]:
    file = folder / "from_deepspeed.py"
    file.write_text(convert_values(folder, values, target="loop").text)
    return runpy.run_path(str(file))


def test_module_of_a_loop_has_what_the_configuration_says(tmp_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 50}
    values = {**PUBLISHED, "bf16": {}, "fp16": fp16}
    module = load_module(tmp_path, values)
    assert module["MICROBATCH"] * module["NUM_MICROBATCHES"] == 64
    assert module["MAX_GRAD_NORM"] == 0.5
    optimizer = module["make_optimizer"]([torch.nn.Parameter(torch.zeros(1))])
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["betas"] == (0.8, 0.98) and optimizer.defaults["eps"] == 1e-6
    scaler = module["make_scaler"]("cpu")
    assert scaler.get_scale() == 1024 and scaler.get_growth_interval() == 50
    assert "elastic train FILE.py:main --workers 8 --layout fsdp=8,zero=2" in module["__doc__"]


def test_module_of_the_documentation_is_the_output(tmp_path: Path) -> None:
    titled = {block.title: block.code for block in blocks(PAGE)}
    (tmp_path / "ds_config.json").write_text(titled["ds_config.json"])
    converted = convert(str(tmp_path / "ds_config.json"), None, "loop")
    assert converted.text.partition('"""\n\n')[2] + "\n" == titled["from_deepspeed.py"]
    assert all(line in PAGE.read_text() for line in converted.lines[-2:])


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"type": "Adam", "params": {"lr": 0.1}}, torch.optim.AdamW),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, torch.optim.Adam),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, torch.optim.SGD),
    ],
)
def test_optimizer_of_a_loop_has_deepspeeds_class(
    optimizer: Any, expected: type, tmp_path: Path
) -> None:
    module = load_module(tmp_path, {"optimizer": optimizer})
    assert type(module["make_optimizer"]([torch.nn.Parameter(torch.zeros(1))])) is expected


def test_elastic_train_accepts_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a shell splits `elastic train tiny --dry-run $(elastic convert ds_config.json)`."""
    (tmp_path / "ds_config.json").write_text(json.dumps(PUBLISHED))
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "convert", "ds_config.json") in (0, None)
    words = capsys.readouterr().out.split()
    assert call(monkeypatch, "train", "tiny", "--data", "random", "--dry-run", *words) in (0, None)
    assert "fsdp=8,zero=2" in capsys.readouterr().out


def test_published_configuration_trains(tmp_path: Path) -> None:
    """`elastic train tiny $(elastic convert ds_config.json)`, in this process, on one worker."""
    changes = changes_of(convert_values(tmp_path, PUBLISHED))
    request = TrainRequest(
        "tiny", "run", str(tmp_path), "1", steps=4, data="random", changes=tuple(changes)
    )
    assert train_in_process(request, Console(quiet=True)) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line)["lr"] for line in lines]
    assert rates == pytest.approx([3e-4 * step / 20 for step in range(1, 5)])
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert recipe["settings"]["batch"] == 64
