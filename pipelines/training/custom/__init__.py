"""Custom modules: a user's module, optimizer and pipeline as a workload."""
