"""The experts of models of `transformers`, dealt to ranks by `ep`, train as in plain ones."""

from __future__ import annotations

from multiprocessing import set_forkserver_preload
from pathlib import Path

import pytest
from causal_lm_cases import Case, assert_equals_plain_loop, run_rank, train_plain_model
from harness import run_in_processes
from test_architectures import save_model
from torch.multiprocessing import start_processes

from actors.runtime.fault_spec import Fault
from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import LayoutRequested
from pipelines.settings import CheckpointSettings

NUM_PROCESSES = 4
CASES = [
    Case("mixtral", "fsdp=2,ep=2"),
    Case("qwen2_moe", "dp=2,fsdp=2,ep=2", 2),
    Case("qwen3_moe", "fsdp=4,ep=2,zero=1"),
    Case("mixtral", "fsdp=2,ep=2,zero=2"),
    Case("mixtral", "tp=2,ep=2"),
    Case("qwen2_moe", "tp=2"),
    Case("qwen3_moe", "cp=2,ep=2"),
    Case("qwen3_moe", "fsdp=2,tp=2,ep=4"),
    Case("mixtral", "pp=2,fsdp=2,ep=2", 2),
    Case("olmoe", "fsdp=2,ep=2"),
    Case("granitemoe", "fsdp=2,ep=2"),
    Case("gpt_oss", "fsdp=2,ep=2"),
    Case("deepseek_v3", "fsdp=2,ep=2", 1, False, 1e-6, 1e-6),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all cases, computed by four processes."""
    folder = tmp_path_factory.mktemp("trained")
    for family in dict.fromkeys(case.model for case in CASES):
        save_model(folder, family)
    set_forkserver_preload(["pipelines.run.program", "plain_causal_lm"])
    arguments = (folder, CASES, NUM_PROCESSES)
    start_processes(run_rank, arguments, NUM_PROCESSES, start_method="forkserver")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dealt_experts_train_as_plain_transformers(trained: Path, case: Case) -> None:
    assert_equals_plain_loop(trained, case)


@pytest.mark.slow
def test_run_over_ep_is_resharded_and_survives_a_kill(tmp_path: Path) -> None:
    """The one worker that is left reads whole experts from the checkpoint."""
    save_model(tmp_path, "qwen3_moe")
    settings = Case("qwen3_moe", "", 2).settings(tmp_path)
    settings = settings.model_copy(
        update={"steps": 8, "eval_every": 0, "checkpoint": CheckpointSettings(every=3)}
    )
    due = ((3, LayoutRequested("other", TargetLayout.parse("tp=2,ep=2"))),)
    faults = (Fault("kill", "w1", 7, "compute"),)
    run = run_in_processes(
        tmp_path / "run", settings, 2, layout="fsdp=2,ep=2", due=due, faults=faults
    )
    assert run.stopped.outcome == "completed"
    layouts = [line["layout"] for line in run.lines_of("Resume")]
    assert layouts[:2] == ["fsdp=2,ep=2", "tp=2,ep=2"], run.story()
    assert "ep" not in layouts[2]
    losses_and_norms, _ = train_plain_model(settings, settings.steps)
    assert [run.losses()[n] for n in range(1, 9)] == pytest.approx(
        [loss for loss, _ in losses_and_norms], rel=1e-9
    )
