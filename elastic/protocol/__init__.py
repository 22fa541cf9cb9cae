"""Protocol: events, commands, phases, policy, controller state, votes and the wire format."""
