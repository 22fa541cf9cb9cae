"""Tracking in MLflow: one process delivers a run's files, and training never waits for it.

This file imports nothing: importing MLflow takes seconds, and only that process needs it.
"""
