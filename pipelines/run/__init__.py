"""Running: from a request to a plan, and from a plan to a finished run."""
