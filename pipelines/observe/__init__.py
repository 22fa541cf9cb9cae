"""Observation of a run: its history, display, status and tracking in MLflow."""
