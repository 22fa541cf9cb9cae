"""Replica: one rank's modules and optimizer, which compute and apply steps."""
