"""Mistakes in custom training loops: one line with the script's line, before any worker starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import ray
from test_bad_input import expect_refusal

SCRIPT = """
import sys
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset


class Growing(lr_scheduler.LRScheduler):
    def get_lr(self):
        self.seen = [*getattr(self, "seen", []), 1.0]
        return [0.1 for _ in self.optimizer.param_groups]


class Named(lr_scheduler.LRScheduler):
    def get_lr(self):
        self.phase = "warm" if self.last_epoch < 2 else "decay"
        return [0.1 for _ in self.optimizer.param_groups]


def train(run):
    images, labels = torch.randn(16, 4), torch.randint(0, 3, (16,))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(images, labels), batch_size=4, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for step in run.steps(6, microbatches=4):
        with step:
            for x, y in step.batches():
                loss = nn.functional.cross_entropy(model(x), y)
                step.backward(loss)
            optimizer.step()
        if step.committed:
            run.print(loss.item())
"""
PREPARE = "model, optimizer, loader = run.prepare(model, optimizer, loader)"
BACKWARD, STEP = "step.backward(loss)", "optimizer.step()"
SGD = "torch.optim.SGD(model.parameters(), lr=0.1)"
FORMED = "a run forms its process groups itself"


def scheduled(expression: str) -> str:
    return f"schedule = {expression}; schedule, {PREPARE.replace('loader)', 'loader, schedule)')}"


MISTAKES = {
    "no backward": (BACKWARD, "pass", "or `loss.backward()`, before the next"),
    "both backwards": (BACKWARD, f"loss.backward(); {BACKWARD}", "once for each of"),
    "backward of a gradient": (
        BACKWARD,
        "loss.backward(create_graph=True)",
        "for gradients of gradients use torch.autograd.grad",
    ),
    "two backwards": (BACKWARD, f"{BACKWARD}; {BACKWARD}", "once for each of `step.batches()`"),
    "loss without a gradient": (BACKWARD, "step.backward(loss.detach())", "without a gradient"),
    "loss as a number": (BACKWARD, "step.backward(loss.item())", "got float: pass the loss itself"),
    "other model": ("model(x), y", "other(x), y", "do not depend on the model's parameters"),
    "unread microbatches": (BACKWARD, f"{BACKWARD}; break", "without `break`"),
    "clipping a list": (
        STEP,
        "nn.utils.clip_grad_norm_(optimizer.param_groups[0]['params'], 1)",
        "max_grad_norm=",
    ),
    "clipping to nothing": (
        "microbatches=4",
        "microbatches=4, max_grad_value=0.0",
        "run.steps: max_grad_value=0.0: must be a number above 0",
    ),
    "hook on a gradient": (
        PREPARE,
        f"model[0].weight.register_hook(lambda g: g / 2); {PREPARE}",
        "0.weight has a hook on its gradient",
    ),
    "complex parameter": (
        SGD,
        f"None; model.turn = nn.Parameter(torch.ones(2) * 1j); optimizer = {SGD}",
        "the model's parameter turn is complex",
    ),
    "hook on a step": (
        PREPARE,
        f"optimizer.register_step_pre_hook(lambda *_: None); {PREPARE}",
        "the optimizer has a hook on its step",
    ),
    "part taken before": (
        "model(x), y",
        "model[2](model[1](first(x))), y",
        "linear of a parameter, or of a part, that was taken out of the model before the loop",
    ),
    "optimizer of an execution before": (
        PREPARE,
        f"global made; made = optimizer = globals().get('made', optimizer); {PREPARE}; "
        "made = optimizer",
        "run.prepare: the SGD was prepared before: the function runs several times",
    ),
    "clipping of a part": (
        STEP,
        "nn.utils.clip_grad_norm_(model[0].parameters(), 1)",
        "clip_grad_norm_ of one of several models, or of a part of one",
    ),
    "closure": (STEP, "optimizer.step(lambda: loss)", "optimizer.step(closure): a run computes"),
    "no block": ("with step:", "if True:", "exist only within `with step:`"),
    "exit": (STEP, "sys.exit(3)", "sys.exit(3) in the loop"),
    "iterated loader": ("step.batches()", "loader", "loop over `step.batches()` instead"),
    "unprepared model": (PREPARE, "run.prepare(optimizer, loader)", "pass run.prepare the model"),
    "LBFGS": (SGD, "torch.optim.LBFGS(model.parameters())", "LBFGS: its step needs a closure"),
    "Muon of vectors": (SGD, "torch.optim.Muon(model.parameters())", "only supports 2D"),
    "growing scheduler": (PREPARE, scheduled("Growing(optimizer)"), "changes seen of its state"),
    "scheduler with words": (PREPARE, scheduled("Named(optimizer)"), "changes phase of its state"),
    "process group": (PREPARE, "torch.distributed.init_process_group('gloo')", FORMED),
    "DDP": (PREPARE, "model = nn.parallel.DistributedDataParallel(model)", FORMED),
    "rank": (PREPARE, "import os; os.environ['RANK']", "use step.is_first_worker"),
    "missing module": (PREPARE, "from no_such_module import GPT", "or put it beside the file"),
    "missing name": (PREPARE, "from torch.nn import GPT", "cannot import name 'GPT'"),
    "number of steps": ("steps(6,", "steps(6.5,", "num_steps=6.5 must be a whole number"),
    "no step": ("for step in run.steps", "for step in list", "TypeError"),
}
FUNCTIONS = {
    "class": ("class train:\n    def __init__(self, run): pass\n", "train is a class"),
    "async": ("async def train(run): pass\n", "line 1: train is an async function"),
    "generator": ("def train(run): yield\n", "line 1: train is a generator"),
    "number": ("train = 3\n", "'train' is int, not a function"),
    "empty": ("def train(run): pass\n", "line 1: train: ended without a step"),
    "no parameter": ("def train(): pass\n", "a custom training loop has one parameter"),
    "two parameters": ("def train(run, path): pass\n", "give path a default"),
}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.delenv("RANK", raising=False)


def refuse_script(script: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The refusal of a script; nothing is started or left."""
    runs = script.parent / "runs"
    arguments = ("train", f"{script}:train", "--workers", "1", "--storage", str(runs))
    line = expect_refusal(capsys, *arguments, "--set", "accelerator=cpu")
    assert not ray.is_initialized() and not runs.exists()
    return line


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_of_a_script_is_refused_with_its_line(name: str, tmp_path: Path, capsys) -> None:
    correct, mistaken, message = MISTAKES[name]
    assert correct in SCRIPT
    text = SCRIPT.replace(correct, mistaken, 1)
    for variable, value in (("other", "nn.Linear(4, 3)"), ("first", "model[0]")):
        if f"{variable}(x)" in mistaken:
            text = text.replace("    optimizer", f"    {variable} = {value}\n    optimizer", 1)
    script = tmp_path / "script.py"
    script.write_text(text)
    line = refuse_script(script, capsys)
    assert message in line
    assert name == "other model" or re.search(rf"{script}, line \d+: ", line), line


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_that_is_no_loop_is_refused(name: str, tmp_path: Path, capsys) -> None:
    text, message = FUNCTIONS[name]
    script = tmp_path / "script.py"
    script.write_text(text)
    assert message in refuse_script(script, capsys)
