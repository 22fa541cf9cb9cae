"""Termination notices that a machine gets from its cloud or cluster."""

from actors.notices.notice import Notice, TimedNotice, see
from actors.notices.watcher import NodeWatcher, watch_this_machine

__all__ = ["NodeWatcher", "Notice", "TimedNotice", "see", "watch_this_machine"]
