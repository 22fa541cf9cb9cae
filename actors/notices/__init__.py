"""Termination notices that a machine gets from its cloud or cluster."""

from actors.notices.notice import Notice, SeenNotice, see
from actors.notices.watcher import NodeWatcher, watch_this_machine

__all__ = ["NodeWatcher", "Notice", "SeenNotice", "see", "watch_this_machine"]
