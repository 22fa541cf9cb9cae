"""Scripts save whole models, freeze parts of them, and read their loader behind the loop."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from actors.runtime.program import Evaluation
from pipelines.loop import Run
from pipelines.loop.prepared.called_module import CalledModels
from pipelines.loop.prepared.model import prepare_model
from pipelines.loop.state.errors import LoopMisused
from pipelines.settings.script_file import module_at
from pipelines.training.passes.passes import evaluating

SCRIPT = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 1)
"""


def test_file_of_a_whole_model_has_the_class_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script_with_a_net.py"
    script.write_text(SCRIPT)
    module = module_at("recipe", str(script))
    model = prepare_model(module.Net(), CalledModels())
    torch.save(model, tmp_path / "net.pt")
    loaded = torch.load(tmp_path / "net.pt", weights_only=False)
    assert type(loaded) is module.Net
    torch.testing.assert_close(loaded.head.weight, model.head.weight)
    by_value = cloudpickle.dumps(module.Net)
    assert b"script_with_a_net" in pickle.dumps(module.Net)
    assert pickle.loads(by_value) is not None and b"head" in by_value


def test_frozen_part_stays_in_evaluation_mode_after_an_evaluation() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].eval()
    sharded: Any = SimpleNamespace(modules=[model], release=lambda: None)
    with evaluating(sharded):
        assert not any(part.training for part in model.modules())
    assert [part.training for part in model.modules()] == [True, True, False]


class Merging(nn.Linear):
    """It merges an update into its weight for evaluation, and takes it out again for training."""

    def train(self, mode: bool = True) -> Merging:
        if mode != self.training:
            with torch.no_grad():
                self.weight += -1.0 if mode else 1.0
        return super().train(mode)


def test_evaluation_ends_by_the_modules_own_code() -> None:
    model = nn.Sequential(Merging(2, 2))
    before = model[0].weight.detach().clone()
    with evaluating(cast(Any, SimpleNamespace(modules=[model], release=lambda: None))):
        assert not torch.equal(model[0].weight, before)
    assert model[0].training
    torch.testing.assert_close(model[0].weight, before)


def make_run(models: CalledModels) -> Run:
    return Run(lambda declaration: iter(()), models, lambda: Evaluation(None))


def test_loader_is_iterated_behind_the_loop() -> None:
    """As `update_bn` does for averaged weights."""
    run = make_run(CalledModels())
    loader = run.prepare(DataLoader(TensorDataset(torch.arange(6)), batch_size=2))
    assert [batch.tolist() for (batch,) in loader] == [[0, 1], [2, 3], [4, 5]]


def test_second_training_in_a_run_is_refused_with_a_way_to_do_it() -> None:
    run = make_run(models := CalledModels())
    run.prepare(nn.Linear(1, 1))
    models.at.begin_training()
    with pytest.raises(LoopMisused, match="To train again with other values") as refused:
        run.prepare(nn.Linear(1, 1))
    assert f"{__file__}, line" in str(refused.value)
