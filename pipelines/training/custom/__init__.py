"""Custom models: a user's module, data, optimizer and pipeline as a workload."""
