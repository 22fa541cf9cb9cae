"""The Python API, modelled on Ray Train: `ElasticTrainer` and `LiveRun`."""

from pipelines.api.live_run import LiveRun
from pipelines.api.trainer import ElasticTrainer
from pipelines.callbacks import Callback
from pipelines.errors import UserError
from pipelines.loop import current_run

__all__ = ["Callback", "ElasticTrainer", "LiveRun", "UserError", "current_run"]
