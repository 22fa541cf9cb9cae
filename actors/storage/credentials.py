"""Credentials in URLs: detected, so that they are never stored, and removed from messages."""

from __future__ import annotations

import re

LOGIN = re.compile(r"//[^/@\s]+@")
PASSWORD = re.compile(r"//[^/@\s]*:[^/@\s]+@")
SECRET = re.compile(
    r"([?&;][^=&;\s]*(?:key|secret|token|passw|sig)[^=&;\s]*)=[^&;\s]*", re.IGNORECASE
)


def has_credentials(url: str) -> bool:
    """Whether a URL has a password, or a query value that looks like a secret."""
    return bool(PASSWORD.search(url) or SECRET.search(url))


def without_credentials(text: str) -> str:
    """Remove `user:password@` and the values of secret query parameters from a text."""
    return SECRET.sub(r"\1=...", LOGIN.sub("//", text))
