"""An aborted worker stops drawing its initial values, also within one large tensor."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from users_policy import users_options

from actors.runtime.interruption import Interruption
from actors.storage.errors import Interrupted
from actors.worker.trainer import Trainer
from elastic.geometry.regions import Region
from pipelines.run.program import TrainingProgram
from pipelines.run.recipes import tiny

VOCAB_SIZE = 20_000_000
"""An embedding of 640 M values: 8 s of drawing."""


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    settings = tiny().model_dump(mode="json") | {"data": {"source": "random", "seq_len": 16}}
    settings["model"] |= {"vocab_size": VOCAB_SIZE, "dim": 32}
    program = TrainingProgram(settings=settings, data_folder=None, device="cpu")
    options = users_options(str(tmp_path))
    return Trainer("w0", "n0", program, options, lambda event: None, Interruption())


def test_abort_interrupts_the_drawing_of_a_large_tensor_within_a_second(trainer: Trainer) -> None:
    largest = max(trainer.specs, key=lambda spec: spec.num_bytes)
    interruption, aborted_at = trainer.interruption, []
    interruption.running_generation = 1

    def abort() -> None:
        aborted_at.append(time.monotonic())
        interruption.aborted_generation = 1

    timer = threading.Timer(0.3, abort)
    timer.start()
    with pytest.raises(Interrupted):
        trainer._draw({largest.name: Region.whole(largest.shape)})
    timer.join()
    assert time.monotonic() - aborted_at[0] < 1.0
