"""Notices: what a machine is told of its own end, by the cloud or the cluster that it runs in."""

from actors.notices.notice import Notice, SeenNotice, see
from actors.notices.watcher import NodeWatcher, watch_this_machine

__all__ = ["NodeWatcher", "Notice", "SeenNotice", "see", "watch_this_machine"]
