"""Local backends: plain child processes, and a single worker in this process."""
