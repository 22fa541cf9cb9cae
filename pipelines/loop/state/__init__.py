"""What of a script is part of the state of the run."""
