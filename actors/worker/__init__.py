"""Worker: the training thread, the step protocol, the part writer."""
