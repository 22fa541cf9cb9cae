"""Observing a run: its history, its display, tracking in MLflow."""
