"""Protocol: events, commands, phases, policy, the controller's state, votes and the wire format."""
