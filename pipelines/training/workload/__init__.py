"""Workload: the model, loss and samples, independent of the layout."""
