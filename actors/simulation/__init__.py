"""The real controller in simulated time: a timeline, nodes, a training gang and its fleet."""
