"""`elastic train` with tp, pp, cp and ep on a real Ray cluster: kills, removals, replacements."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import Command
from shared_cluster import elastic_train

sys.path.append(str(Path(__file__).parents[1] / "processes"))

from expected import expected

from pipelines.run.recipes import load
from pipelines.settings.overrides import override

pytestmark = [pytest.mark.timeout(900), pytest.mark.soak]
SETTINGS = (
    "data.source=random",
    "data.seq_len=16",
    "dtype=float64",
    "batch=8",
    "optimizer.lr=0.0003",
)
"""With the recipe's own learning rate, rounding errors exceed 1e-9 after 400 steps."""


def arguments(recipe: str, layout: str, workers: str, steps: int, *inject: str) -> list[str]:
    words = [recipe, "--layout", layout, "--workers", workers, "--steps", str(steps)]
    for setting in SETTINGS:
        words += ["--set", setting]
    for sentence in inject:
        words += ["--inject", sentence]
    return words


def assert_equals_plain_loop(command: Command, recipe: str, num_steps: int) -> None:
    """Each step is committed once, with the losses of the undisturbed plain loop."""
    losses_and_norms, _ = expected(override(load(recipe), SETTINGS), num_steps)
    metrics = command.metrics()
    assert [line["step"] for line in metrics] == list(range(1, num_steps + 1)), (
        "steps are repeated or lost"
    )
    assert [line["loss"] for line in metrics] == pytest.approx(
        [loss for loss, _ in losses_and_norms], rel=1e-9
    )
    assert not command.lines("RolledBack")


@pytest.mark.parametrize(
    ("recipe", "layout", "killed"),
    [
        ("tiny", "dp=2,pp=2,tp=2", ("w5", "w2")),
        ("tiny_moe", "dp=2,fsdp=2,cp=2,ep=4", ("w3", "w6")),
    ],
    ids=["tp and pp", "cp and ep"],
)
def test_kill_inside_a_group_loses_no_step(
    tmp_path: Path, recipe: str, layout: str, killed: tuple[str, str]
) -> None:
    """Two kills on 8 workers; the second one after the first worker has been replaced."""
    first, second = (name.removeprefix("w") for name in killed)
    with elastic_train(
        tmp_path,
        *arguments(
            recipe, layout, "4:8", 40,
            f"kill worker {first} at step 8", f"kill worker {second} in vote at step 28",
        ),
    ) as command:  # fmt: skip
        code, output = command.finish()
        assert code == 0, output
        assert_equals_plain_loop(command, recipe, 40)
        lost = [line["worker"] for line in command.lines("WorkerLost")]
        pids = {line["worker"]: line["pid"] for line in command.lines("WorkerReady")}
        last_members = command.lines("Resume")[-1]["workers"]
    assert lost == list(killed)
    survivors = {f"w{i}" for i in range(8)} - set(killed)
    assert survivors <= set(pids) and len(survivors & set(last_members)) >= 4


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_model_axis_shrinks_and_grows_back(tmp_path: Path, axis: str) -> None:
    """One of two workers is removed: its state moves to the other, and later to a replacement."""
    with elastic_train(
        tmp_path,
        *arguments("tiny", f"{axis}=2", "1:2", 400, "remove worker 1 at step 10"),
    ) as command:
        command.wait_until(lambda: len(command.lines("Resume")) >= 3, "the growth")
        code, output = command.finish()
        assert code == 0, output
        assert_equals_plain_loop(command, "tiny", 400)
        layouts = [line["layout"] for line in command.lines("Resume")]
        workers = [sorted(line["workers"]) for line in command.lines("Resume")]
    assert workers == [["w0", "w1"], ["w0"], ["w0", "w2"]]
    assert layouts == [f"{axis}=2", "dp=1", f"{axis}=2"]
