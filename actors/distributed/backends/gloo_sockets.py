"""Abort for Gloo: shut its connections from another thread, which is the only abort it has.

`ProcessGroupGloo.abort` does nothing (torch 2.13 to 2.15). A rank whose peer died blocks until its
timeout, unless it shares a connection with that peer. Each Gloo device runs one epoll instance with
exactly one pipe and one listening socket besides its connections, which are shut here.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

_MEMBER = re.compile(r"^tfd:\s*(\d+).*?\bino:\s*([0-9a-f]+)", re.MULTILINE)


@dataclass(frozen=True)
class _Member:
    """A file descriptor in an epoll instance, and its inode at that time."""

    fd: int
    inode: int


def shut_gloo_connections() -> int:
    """Shut every connection of every Gloo device of this process; return how many."""
    num_shut = 0
    for members in _epoll_instances():
        kinds = [(member, _kind(member.fd)) for member in members]
        names = [kind for _, kind in kinds]
        if names.count("pipe") == 1 and names.count("listener") == 1:
            num_shut += sum(_shut(member) for member, kind in kinds if kind == "connection")
    return num_shut


def shut_connections_to(host: str, port: int) -> int:
    """Shut this process's connections to an address, such as the store's; return how many."""
    address = (socket.gethostbyname(host), port)
    num_shut = 0
    for fd in _open_fds():
        with suppress(OSError):
            inode = os.fstat(fd).st_ino
            if _peer(fd) == address:
                num_shut += _shut(_Member(fd, inode))
    return num_shut


def _epoll_instances() -> Iterator[list[_Member]]:
    for fd in _open_fds():
        with suppress(OSError):  # closed meanwhile by its owner
            if os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventpoll]":
                with open(f"/proc/self/fdinfo/{fd}") as info:
                    entries = _MEMBER.findall(info.read())
                yield [_Member(int(number), int(inode, 16)) for number, inode in entries]


def _open_fds() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _kind(fd: int) -> str:
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
        if target.startswith("pipe:"):
            return "pipe"
        if not target.startswith("socket:"):
            return "other"
        with _borrowed(fd) as sock:
            listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return "listener" if listens else "connection"
    except OSError:
        return "other"


def _peer(fd: int) -> tuple[str, int] | None:
    if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
        return None
    with _borrowed(fd) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        host, port = sock.getpeername()[:2]
    return host.removeprefix("::ffff:"), port


def _shut(member: _Member) -> bool:
    """Shut the socket if the descriptor still refers to the same inode."""
    with suppress(OSError), _borrowed(member.fd) as sock:
        if os.fstat(sock.fileno()).st_ino == member.inode:
            sock.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _borrowed(fd: int) -> socket.socket:
    """A duplicate of the descriptor: closing it does not close the owner's."""
    return socket.socket(fileno=os.dup(fd))
