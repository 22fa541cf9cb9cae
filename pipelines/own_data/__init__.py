"""Data of one's own, map-style: Arrow and Parquet files, mixtures, what Ray Data has prepared."""

from pipelines.own_data.arrow import ArrowDataset
from pipelines.own_data.from_ray import from_ray_dataset
from pipelines.own_data.mixture import Mixture

__all__ = ["ArrowDataset", "Mixture", "from_ray_dataset"]
