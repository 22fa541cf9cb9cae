"""Any command line and setting is accepted or refused in one line: no traceback, never slow.

A dry run stops before Ray and training; the other checks before Ray starts are called directly.
Each commit draws new examples; a failing example is printed with the seed that repeats all of
them. More examples: `FUZZ_EXAMPLES=20000 pytest tests/unit/test_fuzzed_input.py`.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, note, seed, settings
from hypothesis import strategies as st
from sim.fresh_seeds import base

from pipelines.cli import main
from pipelines.errors import UserError
from pipelines.run.drive import plan_on_this_machine
from pipelines.run.plan import TrainRequest
from pipelines.run.recipes import RECIPES as NAMED
from pipelines.run.recipes import mlp, tiny
from pipelines.run.refusals import BUILT_IN
from pipelines.run.sweep import SweepRequest, trials_of
from pipelines.settings.settings import RESUMABLE_SETTINGS

pytestmark = pytest.mark.slow

NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "150"))
MAX_S = 3.0
"""Processor time of this process, so that other processes do not count."""
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
    "http://[ sqlite:///x file:///nowhere / . .. ~ ~nouser ~nosuch %s {} [] "
    "[bold] \u00e9 \U0001f600"
)
SENTENCES = ["", " ", "kill worker 1 at step 3", "slow worker 2 by 3x at step 3", "x\ny", "\t"]
ARBITRARY = st.text(st.characters(exclude_characters="\0"), max_size=12)
TEXTS = st.one_of(st.sampled_from([*NUMBERS, *WORDS, *SENTENCES]), ARBITRARY)


def keys_of(values: dict[str, object], prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        keys += keys_of(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
    return keys


KEYS = sorted({*keys_of(tiny().model_dump()), *keys_of(mlp().model_dump()), *RESUMABLE_SETTINGS})
SETTING = st.builds("{}={}".format, st.sampled_from(KEYS), TEXTS)
OPTION_AND_VALUE = st.one_of(
    st.tuples(st.just("--set"), SETTING),
    st.tuples(st.sampled_from(OPTIONS), TEXTS),
)
TREES = {"/", ".", "..", "~", "", " "}
"""As data these are whole file systems or the standard library, which take long to list."""
RECIPES = st.one_of(st.sampled_from(["tiny", "mlp", "tiny_moe", "finetune", "hf:x", ":f"]), TEXTS)


def fuzzed(fraction: float = 1.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """New examples with each commit; `ELASTIC_SIM_BASE` is their seed."""
    limits = settings(
        max_examples=max(1, int(fraction * NUM_EXAMPLES)),
        suppress_health_check=[HealthCheck.too_slow],
    )
    return lambda test: seed(base())(limits(test))


def run_command(arguments: list[str]) -> tuple[int, str]:
    """The exit code and standard error; any exception but SystemExit fails the test."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["elastic", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as exited:
        return int(exited.code or 0), err.getvalue()
    finally:
        sys.argv = before
    raise AssertionError("main returned")


def assert_accepted_or_refused(arguments: list[str], codes: tuple[int, ...] = (0, 2)) -> None:
    note(f"elastic {arguments}; ELASTIC_SIM_BASE={base()} repeats all examples")
    started, started_s = time.monotonic(), time.process_time()
    code, stderr = run_command(arguments)
    elapsed_s, busy_s = time.monotonic() - started, time.process_time() - started_s
    assert code in codes, stderr
    assert len(stderr.splitlines()) <= (code == 2), stderr
    assert "Traceback" not in stderr
    assert not stderr or stderr.startswith("elastic: ")
    assert busy_s < MAX_S and elapsed_s < MAX_ON_A_BUSY_MACHINE_S, f"{elapsed_s:.1f} s"


@pytest.fixture(scope="module", autouse=True)
def temporary_folder() -> Iterator[None]:
    """A temporary working folder, without a Ray cluster."""
    previous, temporary = os.getcwd(), tempfile.TemporaryDirectory()
    with temporary as folder, pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_ADDRESS", "local")
        os.chdir(folder)
        Path("text.txt").write_text("Some text to train on. " * 400)
        yield
        os.chdir(previous)


@fuzzed()
@given(RECIPES, st.lists(OPTION_AND_VALUE, max_size=4))
def test_any_command_line_of_train_is_accepted_or_refused(
    recipe: str, option_pairs: list[tuple[str, str]]
) -> None:
    assume(not any(option == "--data" and text in TREES for option, text in option_pairs))
    options = [word for pair in option_pairs for word in pair]
    has_data = any(option == "--data" for option, _ in option_pairs)
    data = [] if has_data else ["--data", "random"]
    assert_accepted_or_refused(["train", *data, *options, "--dry-run", "--", recipe])


@fuzzed()
@given(st.sampled_from(["tiny", "mlp", "tiny_moe"]), st.lists(SETTING, min_size=1, max_size=4))
def test_any_settings_are_accepted_or_refused(recipe: str, changes: list[str]) -> None:
    options = [word for change in changes for word in ("--set", change)]
    assert_accepted_or_refused(["train", recipe, *options, "--data", "random", "--dry-run"])


COMMANDS = ["status", "logs", "reshard", "export", "plan", "prepare", "nosuch"]
FLAGS = st.lists(st.sampled_from(["--json", "--repair"]), max_size=1)


@fuzzed(0.5)
@given(
    st.sampled_from(COMMANDS),
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
    FLAGS,
)
def test_any_other_command_is_accepted_or_refused(
    command: str, words: list[str], option_pairs: list[tuple[str, str]], flags: list[str]
) -> None:
    assume(command != "prepare" or TREES.isdisjoint(words))
    options = [*flags, *(word for pair in option_pairs for word in pair)]
    assert_accepted_or_refused([command, *options, "--", *words])


RAW = st.one_of(
    st.sampled_from([*OPTIONS, "-", "--", "-x", "---", "--help", "--dry-run", "--set="]),
    st.sampled_from(OPTIONS).map("{}=".format),
    st.builds("{}={}".format, st.sampled_from(OPTIONS), TEXTS),
    TEXTS.filter(lambda text: text not in TREES),
)


@fuzzed()
@given(st.lists(RAW, max_size=5))
def test_damaged_options_of_train_are_accepted_or_refused(raw: list[str]) -> None:
    """Options without a value, with an empty one, a bare dash; `--dry-run` comes first, so that no
    option takes it as its value."""
    assert_accepted_or_refused(["train", "--dry-run", "--data=random", *raw])


@fuzzed(0.5)
@given(st.sampled_from([*COMMANDS, "doctor", "sweep"]), st.lists(RAW, max_size=4))
def test_damaged_options_of_other_commands_are_accepted_or_refused(
    command: str, raw: list[str]
) -> None:
    assume(command != "doctor" or any("=" in word or not word[:1].isalnum() for word in raw))
    arguments = [command, "--nosuch", *raw] if command in ("doctor", "sweep") else [command, *raw]
    assert_accepted_or_refused(arguments)


@fuzzed(0.2)
@given(TEXTS, st.sampled_from(["runs", "nowhere", "text.txt"]), FLAGS)
def test_doctor_accepts_or_refuses_any_run(run: str, storage: str, flags: list[str]) -> None:
    flags = [flag for flag in flags if flag == "--repair"]
    assert_accepted_or_refused(["doctor", "--storage", storage, *flags, "--", run], (0, 1, 2))


def assert_planned_or_refused(plan: Callable[[], object]) -> None:
    """Make the plan of a command, without the command line."""
    started_s = time.process_time()
    try:
        plan()
    except UserError as error:
        assert str(error) and "Traceback" not in str(error)
    assert time.process_time() - started_s < MAX_S


REQUEST_FIELDS = {
    "run_name": TEXTS,
    "storage": st.sampled_from(["runs", "text.txt", "nowhere/at/all"]),
    "workers": TEXTS,
    "layout": TEXTS,
    "steps": st.integers(-2, 10**6),
    "data": st.sampled_from(["random", "text.txt", "nowhere.txt", "*.txt"]),
    "inject": st.tuples(TEXTS),
    "tracking_uri": TEXTS,
    "interface": TEXTS,
    "ports": TEXTS,
    "notify": TEXTS,
    "detach": st.booleans(),
    "profile": TEXTS,
}


@fuzzed(0.5)
@given(RECIPES, st.fixed_dictionaries({}, optional=REQUEST_FIELDS), st.lists(SETTING, max_size=2))
def test_plan_of_any_request_is_made_or_refused(
    recipe: str, options: dict[str, Any], changes: list[str]
) -> None:
    """The plan prepares the data, which a dry run does not do."""
    request = TrainRequest(recipe, **{"data": "text.txt", **options}, changes=tuple(changes))
    note(f"{request}; ELASTIC_SIM_BASE={base()} repeats all examples")
    assert_planned_or_refused(lambda: plan_on_this_machine(request))


@fuzzed(0.5)
@given(
    RECIPES,
    st.one_of(TEXTS, st.lists(TEXTS, max_size=3).map(";".join), st.just("tp=1;dp=2,tp=2")),
    st.sampled_from(["runs", "text.txt", "s3://b"]),
    st.integers(-1, 10**6),
    st.lists(SETTING, max_size=2),
    st.one_of(st.just(600.0), st.floats()),
)
def test_any_sweep_is_planned_or_refused(
    recipe: str, layouts: str, storage: str, steps: int, changes: list[str], start_timeout_s: float
) -> None:
    train = TrainRequest(
        recipe, storage=storage, steps=steps, data="random", changes=tuple(changes)
    )
    request = SweepRequest(train, layouts, start_timeout_s)
    note(f"{request}; ELASTIC_SIM_BASE={base()} repeats all examples")
    assert_planned_or_refused(lambda: trials_of(request, Path(storage) / "sweeps" / "now", 0))


def test_early_refusals_know_all_built_in_recipes() -> None:
    assert tuple(NAMED) == BUILT_IN


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "tyni"],
        ["train", "tiny", "--workers", "4:2"],
        ["train", "tiny", "--layout", "zp=2"],
        ["sweep", "tyni", "--layouts", "tp=1"],
        ["train", "tiny", "--wrokers", "2"],
    ],
)
def test_new_process_refuses_a_typing_error_at_once(arguments: list[str]) -> None:
    """The bound is on processor time, so that other processes do not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pipelines", *arguments]
    finished = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env=environment()
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert finished.returncode == 2 and len(finished.stderr.splitlines()) == 1, finished.stderr
    busy_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert busy_s <= MAX_S


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "~nosuch"],
        ["prepare", "~nosuch", "out"],
        ["train", "hf:~nosuch", "--dry-run", "--data", "random"],
        ["train", "tiny", "--dry-run", "--data", "~nosuch/x"],
        ["train", "tiny", "--dry-run", "--data", "text.txt", "--set", "data.tokenizer=~nosuch"],
    ],
)
def test_home_folder_of_an_unknown_user_is_refused(arguments: list[str]) -> None:
    code, stderr = run_command(arguments)
    assert code == 2 and len(stderr.splitlines()) == 1 and "~nosuch" in stderr
