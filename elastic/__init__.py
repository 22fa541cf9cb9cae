"""elastic decides: pure values and functions; time comes in as an argument.

Begin with `Core.step(now, event) -> commands`; `events` and `commands` are all that goes in and
comes out, `phases` says where it may go.
"""

from elastic.controller.core import Core
from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.policy import Policy

__all__ = ["Core", "Job", "Layout", "Policy", "TargetLayout"]
