"""Settings of a run: everything that a recipe can choose."""

from pipelines.settings.fault_tolerance import (
    AuditSettings,
    CheckpointSettings,
    FailureSettings,
    GrowthSettings,
    HealthSettings,
    LossMonitorSettings,
    QuarantineSettings,
    SnapshotSettings,
    StragglerSettings,
)
from pipelines.settings.models import (
    CustomModelSettings,
    ExpertsSettings,
    HuggingFaceSettings,
    LoraSettings,
    MlpSettings,
    TransformerSettings,
)
from pipelines.settings.setting import Settings
from pipelines.settings.settings import (
    CacheSettings,
    DataSettings,
    NetworkSettings,
    OptimizerSettings,
    ReadingSettings,
    TrainSettings,
)

__all__ = [
    "AuditSettings",
    "CacheSettings",
    "CheckpointSettings",
    "CustomModelSettings",
    "DataSettings",
    "ExpertsSettings",
    "FailureSettings",
    "GrowthSettings",
    "HealthSettings",
    "HuggingFaceSettings",
    "LoraSettings",
    "LossMonitorSettings",
    "MlpSettings",
    "NetworkSettings",
    "OptimizerSettings",
    "QuarantineSettings",
    "ReadingSettings",
    "Settings",
    "SnapshotSettings",
    "StragglerSettings",
    "TrainSettings",
    "TransformerSettings",
]
