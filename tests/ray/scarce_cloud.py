"""Ray's fake cloud on one machine, in which some node types are scarce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider
from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.tags import TAG_RAY_USER_NODE_TYPE


class ScarceProvider(FakeMultiNodeProvider):
    """Refuses node types, as EC2 refuses spot machines, until the file exists that `lacking` in its
    configuration names for them."""

    def create_node_with_resources_and_labels(
        self, node_config: Any, tags: dict[str, str], count: int, resources: Any, labels: Any
    ) -> None:
        awaited = self.provider_config["lacking"].get(tags[TAG_RAY_USER_NODE_TYPE])
        if awaited and not Path(awaited).exists():
            raise NodeLaunchException("InsufficientInstanceCapacity", "there is none", None)
        super().create_node_with_resources_and_labels(node_config, tags, count, resources, labels)
