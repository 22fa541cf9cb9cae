"""Map-style datasets for custom models: Arrow and Parquet files, tar and MDS shards, mixtures,
output of Ray Data."""

from pipelines.custom_data.arrow import ArrowDataset
from pipelines.custom_data.from_ray import from_ray_dataset
from pipelines.custom_data.mixture import Mixture
from pipelines.custom_data.sample_shards.mds_dataset import MdsDataset
from pipelines.custom_data.sample_shards.tar_dataset import TarDataset

__all__ = ["ArrowDataset", "MdsDataset", "Mixture", "TarDataset", "from_ray_dataset"]
