"""The worker: its training thread, the step protocol and the checkpoint part writer."""
