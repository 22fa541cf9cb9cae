"""Reader processes: the samples of coming passes are read while the current one is computed."""
