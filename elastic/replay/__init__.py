"""Journal and replay: what the journal records, and how a restarted controller reads it."""
