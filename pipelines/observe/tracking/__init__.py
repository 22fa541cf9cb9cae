"""A run in MLflow: one process follows the run's files and delivers them; training never waits.

Nothing is imported here: MLflow takes seconds, and only that process needs it.
"""
