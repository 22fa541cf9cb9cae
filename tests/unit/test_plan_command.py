"""`elastic plan RECIPE`: tables and JSON without data or GPUs, and refusals of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from in_process_command import RunCommand, in_process

CUSTOM = str(Path(__file__).parents[2] / "examples" / "custom_model.py")


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    return in_process("plan", monkeypatch, capsys)


def plans(text: str) -> list[dict[str, Any]]:
    [line] = text.splitlines()
    return json.loads(line)["plans"]


def test_table_names_layouts_speed_price_and_the_command(plan) -> None:
    code, out, _ = plan("tiny", "--device", "L4", "--price", "L4=0.71", "--workers", "2")
    assert code == 0
    for word in ("tiny on 2 workers, L4 with 24 GB", "the shortest step", "price", "activations"):
        assert word in out
    assert "elastic train tiny --workers 2 --layout " in out


def test_json_has_bytes_by_kind_that_sum_up(plan) -> None:
    code, out, _ = plan("tiny", "--device", "cpu,H100-80GB", "--workers", "2,4", "--json")
    assert code == 0
    tables = plans(out)
    assert [(t["device"]["name"], t["workers"]) for t in tables] == [
        ("cpu", 2),
        ("cpu", 4),
        ("H100-80GB", 2),
        ("H100-80GB", 4),
    ]
    for row in tables[0]["layouts"]:
        kinds = dict(row["bytes"])
        total = kinds.pop("total")
        assert sum(kinds.values()) == total and kinds["activations"] > 0
        assert row["fits"] and row["step_s"] > 0 and row["tokens_per_s"] > 0


def test_checkpointing_and_dtype_change_the_bytes(plan) -> None:
    def first(*changes: str) -> dict[str, Any]:
        words = [word for change in changes for word in ("--set", change)]
        arguments = ("--layout", "dp=1", "--workers", "1", "--device", "H100", "--json", *words)
        _, out, _ = plan("tiny", "--set", "microbatch=4", *arguments)
        [table] = plans(out)
        return table["layouts"][0]["bytes"]

    plain = first()
    assert first("activation_checkpointing=full")["activations"] < plain["activations"]
    assert first("dtype=bfloat16")["copies"] == plain["parameters"] // 2


def test_custom_recipe_is_planned(plan) -> None:
    code, out, _ = plan(f"{CUSTOM}:recipe", "--device", "L4", "--workers", "2", "--json")
    assert code == 0
    [table] = plans(out)
    assert table["best"] and table["layouts"][0]["bytes"]["activations"] > 0


def test_other_device_is_given_by_its_figures(plan) -> None:
    figures = ("--device-memory", "100", "--device-flops", "500")
    code, out, _ = plan("tiny", "--device", "X9", *figures, "--workers", "1", "--json")
    assert code == 0
    assert plans(out)[0]["device"]["memory_gb"] == 100


def test_exit_code_is_1_where_nothing_fits(plan) -> None:
    code, out, _ = plan("tiny", "--device", "L4", "--device-memory", "0.0001", "--workers", "2")
    assert code == 1 and "no layout fits 2 workers" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give a recipe"),
        (("tiny", "--model-params", "7e9"), "not both"),
        (("tiny", "--device", "X9"), "--device-memory GB and --device-flops TFLOPS"),
        (("tiny", "--device", "L4", "--workers", "0"), "--workers 0"),
        (("tiny", "--device", "L4", "--workers", "2;4"), "--workers 2;4"),
        (("tiny", "--device", "L4", "--layout", "dp=x"), "--layout"),
        (("tiny", "--device", "L4", "--device-memory", "-1"), "--device-memory"),
        (("tiny", "--device", "L4", "--efficiency", "2"), "--efficiency"),
        (("tiny", "--device", "L4", "--price", "dear"), "--price"),
        (("tiny", "--device", "L4", "--price", "A10=2"), "--price a10=...: no such device is"),
        (("tiny", "--device", "L4", "--set", "dtype=float64"), "float64"),
        (("tinny",), "tinny"),
    ],
)
def test_bad_input_is_refused_in_one_line(plan, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = plan(*arguments)
    assert (code, out) == (2, "")
    assert words in err and len(err.splitlines()) == 1
