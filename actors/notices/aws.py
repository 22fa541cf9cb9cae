"""AWS: spot interruptions, two minutes ahead, and rebalance recommendations, through IMDSv2."""

from __future__ import annotations

import json
from datetime import datetime
from urllib.error import HTTPError

from actors.notices.notice import LINK_LOCAL, Notice, ask, epoch_of

TOKEN_LIFE_S = 21600
UNAUTHORIZED = 401


class Aws:
    """Source: AWS, Amazon EC2 User Guide, "Spot Instance interruption notices" and "EC2 instance
    rebalance recommendations"."""

    def __init__(self, address: str = LINK_LOCAL) -> None:
        self._address = address
        self._token = ""

    def look(self) -> Notice | None:
        """See `Source`. A rebalance recommendation has no deadline."""
        interruption = self._ask("spot/instance-action")
        if interruption:
            told = json.loads(interruption)
            deadline = epoch_of(datetime.fromisoformat(told["time"]))
            return Notice(f"AWS spot interruption: {told['action']}", deadline)
        if self._ask("events/recommendations/rebalance"):
            return Notice("AWS rebalance recommendation")
        return None

    def _ask(self, path: str) -> str | None:
        """With the session's token, or another if it has run out."""
        try:
            return self._ask_once(path)
        except HTTPError as error:
            if error.code != UNAUTHORIZED:
                raise
            self._token = ""
            return self._ask_once(path)

    def _ask_once(self, path: str) -> str | None:
        if not self._token:
            life = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_LIFE_S)}
            self._token = ask(f"{self._address}/latest/api/token", life, method="PUT") or ""
            if not self._token:
                raise OSError("no session token: this is not AWS")
        headers = {"X-aws-ec2-metadata-token": self._token}
        return ask(f"{self._address}/latest/meta-data/{path}", headers)
