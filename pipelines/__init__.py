"""Training: models, data, recipes, checkpoints, tracking and the command line.

A recipe is a function that returns `TrainSettings`. Start reading at `run.recipes` and
`run.program`.

This file imports nothing, so that `elastic --help` answers at once.
"""
