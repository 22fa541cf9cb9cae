"""What a machine keeps of files at URLs: cached files and folders, bounded, evicted by LRU."""

from pipelines.data.cache.local_copies import LocalCopies, cache_folder
from pipelines.data.cache.local_folder import local_folder
from pipelines.data.cache.shard_cache import CacheKey, HeldFile, ShardCache

__all__ = ["CacheKey", "HeldFile", "LocalCopies", "ShardCache", "cache_folder", "local_folder"]
