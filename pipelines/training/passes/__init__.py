"""Forward and backward passes over microbatches, pipeline schedules, evaluation."""
