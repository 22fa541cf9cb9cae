"""What `run.prepare` makes of the objects of a script."""
