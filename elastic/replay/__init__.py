"""Replay: what the journal holds, and how a restarted controller reads it back."""
