"""Credentials in URLs, which are refused where they would be kept, and never shown."""

from __future__ import annotations

import re

LOGIN = re.compile(r"//[^/@\s]+@")
PASSWORD = re.compile(r"//[^/@\s]*:[^/@\s]+@")
SECRET = re.compile(
    r"([?&;][^=&;\s]*(?:key|secret|token|passw|sig)[^=&;\s]*)=[^&;\s]*", re.IGNORECASE
)


def has_credentials(url: str) -> bool:
    """Whether it has a password, or a query that looks like one."""
    return bool(PASSWORD.search(url) or SECRET.search(url))


def without_credentials(text: str) -> str:
    """A text without the `user:password@` of its URLs, and the values of such queries."""
    return SECRET.sub(r"\1=...", LOGIN.sub("//", text))
