"""AWS notices through IMDSv2: spot interruptions (two minutes ahead), rebalance recommendations."""

from __future__ import annotations

import json
from datetime import datetime
from urllib.error import HTTPError

from actors.notices.notice import LINK_LOCAL, Notice, epoch_of, query_metadata

TOKEN_LIFE_S = 21600
UNAUTHORIZED = 401


class Aws:
    """Source: AWS, Amazon EC2 User Guide, "Spot Instance interruption notices" and "EC2 instance
    rebalance recommendations"."""

    def __init__(self, address: str = LINK_LOCAL) -> None:
        self._address = address
        self._token = ""

    def poll(self) -> Notice | None:
        """See `NoticeSource`. A rebalance recommendation has no deadline."""
        interruption = self._get("spot/instance-action")
        if interruption:
            fields = json.loads(interruption)
            deadline = epoch_of(datetime.fromisoformat(fields["time"]))
            return Notice(f"AWS spot interruption: {fields['action']}", deadline)
        if self._get("events/recommendations/rebalance"):
            return Notice("AWS rebalance recommendation")
        return None

    def _get(self, path: str) -> str | None:
        """Get an item with the session token; if the token has expired, with a new one."""
        try:
            return self._get_once(path)
        except HTTPError as error:
            if error.code != UNAUTHORIZED:
                raise
            self._token = ""
            return self._get_once(path)

    def _get_once(self, path: str) -> str | None:
        if not self._token:
            life = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_LIFE_S)}
            self._token = (
                query_metadata(f"{self._address}/latest/api/token", life, method="PUT") or ""
            )
            if not self._token:
                raise OSError("the metadata server gives no session token: this is not AWS")
        headers = {"X-aws-ec2-metadata-token": self._token}
        return query_metadata(f"{self._address}/latest/meta-data/{path}", headers)
