"""Settings: all that a recipe may choose."""

from pipelines.settings.settings import (
    CacheSettings,
    CustomModelSettings,
    DataSettings,
    ExpertsSettings,
    HuggingFaceSettings,
    LoraSettings,
    MlpSettings,
    NetworkSettings,
    OptimizerSettings,
    Settings,
    TrainSettings,
    TransformerSettings,
)

__all__ = [
    "CacheSettings",
    "CustomModelSettings",
    "DataSettings",
    "ExpertsSettings",
    "HuggingFaceSettings",
    "LoraSettings",
    "MlpSettings",
    "NetworkSettings",
    "OptimizerSettings",
    "Settings",
    "TrainSettings",
    "TransformerSettings",
]
