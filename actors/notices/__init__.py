"""Termination notices that a machine gets from its cloud or cluster."""

from actors.notices.notice import Notice, TimedNotice, with_time_left
from actors.notices.watcher import NodeWatcher, watch_this_machine

__all__ = ["NodeWatcher", "Notice", "TimedNotice", "watch_this_machine", "with_time_left"]
