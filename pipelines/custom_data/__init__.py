"""Map-style datasets for custom models: Arrow and Parquet files, mixtures, output of Ray Data."""

from pipelines.custom_data.arrow import ArrowDataset
from pipelines.custom_data.from_ray import from_ray_dataset
from pipelines.custom_data.mixture import Mixture

__all__ = ["ArrowDataset", "Mixture", "from_ray_dataset"]
