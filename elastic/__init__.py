"""The decisions of an elastic run: pure values and functions that get the time as an argument.

Start reading at `Core.step(now, event) -> commands`. `protocol.events` lists its inputs,
`protocol.commands` its outputs, and `protocol.phases` the legal transitions.
"""

from elastic.controller.core import Core
from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.policy import Policy

__all__ = ["Core", "Job", "Layout", "Policy", "TargetLayout"]
