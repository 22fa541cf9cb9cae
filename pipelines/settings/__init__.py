"""Settings of a run: everything that a recipe can choose."""

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
