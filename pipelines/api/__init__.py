"""The Python API, in the terms of Ray Train: `ElasticTrainer`, and what its methods return."""

from pipelines.api.live_run import LiveRun
from pipelines.api.trainer import ElasticTrainer
from pipelines.settings.errors import UserError

__all__ = ["ElasticTrainer", "LiveRun", "UserError"]
