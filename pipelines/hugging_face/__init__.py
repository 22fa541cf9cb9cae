"""Models as `transformers` keeps them: exported from checkpoints, and to begin a run from."""

from pipelines.hugging_face.configuration import transformer_from

__all__ = ["transformer_from"]
