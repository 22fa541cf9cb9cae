"""Samples in shards that other libraries write: tar files of WebDataset, MDS of Streaming."""
