"""`elastic simulate`: the real controller over a trace of availability, in simulated time."""
