"""Hugging Face models: training, import from and export to the format of `transformers`."""

from pipelines.hugging_face.configuration import transformer_from

__all__ = ["transformer_from"]
