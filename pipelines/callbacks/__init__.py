"""Callbacks: the user's code, called in the launching process for each step and event of a run."""

from pipelines.callbacks.callback import Callback
from pipelines.callbacks.records import (
    CommittedStep,
    CompletedReshard,
    EndedRun,
    HeldOutResult,
    ReceivedNotice,
    SavedCheckpoint,
    StartedRun,
)
from pipelines.callbacks.to_tensorboard import TensorBoardCallback
from pipelines.callbacks.to_wandb import WandbCallback

__all__ = [
    "Callback",
    "CommittedStep",
    "CompletedReshard",
    "EndedRun",
    "HeldOutResult",
    "ReceivedNotice",
    "SavedCheckpoint",
    "StartedRun",
    "TensorBoardCallback",
    "WandbCallback",
]
