"""Any command line and any setting is taken, or refused in one line: never a traceback, never slow.

A dry run is what stops before Ray and training: everything before is the command's own way. More
examples: `FUZZ_EXAMPLES=20000 pytest tests/unit/test_fuzzed_input.py`.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.cli import main
from pipelines.overrides import WHERE_AND_HOW
from pipelines.recipes import mlp, tiny

NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "150"))
MAX_S = 3.0
"""Of this process's own time, so that other processes do not count."""
MAX_ON_A_BUSY_MACHINE_S = 30.0


def words(text: str) -> list[str]:
    return text.split()


OPTIONS = words(
    "--run-name --storage --workers --layout --steps --data --set --audit-every --inject "
    "--tracking-uri --experiment --interface --ports --notify --profile --detach --in-process "
    "--record-samples --nosuch"
)
NUMBERS = words(
    "0 1 2 3 -1 007 1e3 1_0 0.5 1.5 inf -inf nan Infinity 1e400 1e308 5e-324 \uff14 \u0663 \u00b2 "
    "99999 999999999999 99999999999999999999999 9223372036854775807 9223372036854775808 0x10 +1 "
    "1e-9"
)
WORDS = words(
    "none null true false yes data random tiny bfloat16 float64 1f1b zero_bubble cpu auto copy "
    "xor:1 xor:2 xor:9999 1:2 2:1 0:5 1:65535 dp=2 fsdp=2,tp=2 tp=3 pp=2,vp=2 ep=2 zero=3 dp=0 "
    "dp=2,dp=2 zero=FULL_SHARD steps=1:2 15min .5min 0min lo s3:// s3://b banana://x http://x "
    "http://[ sqlite:///x file:///nowhere / . .. ~ ~nobody %s {} [] [bold] \u00e9 \U0001f600"
)
SENTENCES = ["", " ", "kill worker 1 at step 3", "slow worker 2 by 3x at step 3", "x\ny", "\t"]
ARBITRARY = st.text(st.characters(exclude_characters="\0"), max_size=12)
TEXTS = st.one_of(st.sampled_from([*NUMBERS, *WORDS, *SENTENCES]), ARBITRARY)


def keys_of(values: dict[str, object], prefix: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        found += keys_of(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
    return found


KEYS = sorted({*keys_of(tiny().model_dump()), *keys_of(mlp().model_dump()), *WHERE_AND_HOW})
SETTING = st.builds("{}={}".format, st.sampled_from(KEYS), TEXTS)
GIVEN = st.one_of(
    st.tuples(st.just("--set"), SETTING),
    st.tuples(st.sampled_from(OPTIONS), TEXTS),
)
RECIPES = st.one_of(st.sampled_from(["tiny", "mlp", "tiny_moe", "finetune", "hf:x", ":f"]), TEXTS)


def told_by(arguments: list[str]) -> tuple[int, str]:
    """The exit code and standard error; whatever else comes out of `main` fails the test."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["elastic", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ended:
        return int(ended.code or 0), err.getvalue()
    finally:
        sys.argv = before
    raise AssertionError("it has not ended")


def assert_taken_or_refused(arguments: list[str]) -> None:
    began, began_s = time.monotonic(), time.process_time()
    code, told = told_by(arguments)
    lasted_s, busy_s = time.monotonic() - began, time.process_time() - began_s
    assert code in (0, 2), told
    assert len(told.splitlines()) <= (1 if code else 0), told
    assert "Traceback" not in told
    assert not told or told.startswith("elastic: ")
    assert busy_s < MAX_S and lasted_s < MAX_ON_A_BUSY_MACHINE_S, f"{lasted_s:.1f} s"


@pytest.fixture(scope="module", autouse=True)
def somewhere() -> None:
    """A folder that goes away, with no cluster at hand."""
    here, there = os.getcwd(), tempfile.TemporaryDirectory()
    with there as folder, pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_ADDRESS", "local")
        os.chdir(folder)
        yield
        os.chdir(here)


@settings(max_examples=NUM_EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(RECIPES, st.lists(GIVEN, max_size=4))
def test_any_command_line_of_train(recipe: str, given_: list[tuple[str, str]]) -> None:
    options = [word for pair in given_ for word in pair]
    is_said = any(option == "--data" for option, _ in given_)
    more = [] if is_said else ["--data", "random"]
    assert_taken_or_refused(["train", *more, *options, "--dry-run", "--", recipe])


@settings(max_examples=NUM_EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(["tiny", "mlp", "tiny_moe"]), st.lists(SETTING, min_size=1, max_size=4))
def test_any_settings(recipe: str, changes: list[str]) -> None:
    options = [word for change in changes for word in ("--set", change)]
    assert_taken_or_refused(["train", recipe, *options, "--data", "random", "--dry-run"])


@settings(max_examples=NUM_EXAMPLES // 2)
@given(
    st.sampled_from(["status", "logs", "relayout", "export", "plan", "prepare", "nosuch"]),
    st.lists(TEXTS, max_size=2),
    st.lists(
        st.tuples(
            st.sampled_from(
                words(
                    "--storage --worker --layout --step --dtype --format --out --model-params "
                    "--world-sizes --price --tokenizer --held-out-fraction"
                )
            ),
            TEXTS,
        ),
        max_size=3,
    ),
)
def test_any_other_command(command: str, words: list[str], given_: list[tuple[str, str]]) -> None:
    options = [word for pair in given_ for word in pair]
    assert_taken_or_refused([command, *options, "--", *words])
