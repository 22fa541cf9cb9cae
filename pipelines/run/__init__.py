"""Running a training: request, plan, start and end of a run."""
