"""elastic decides: pure values and functions; time comes in as an argument.

Begin with `Core.step(now, event) -> commands`; `events` and `commands` are all that goes in and
comes out, `phases` says where it may go.
"""

from elastic.core import Core
from elastic.layout import Layout
from elastic.planning import Job, Wish
from elastic.policy import Policy

__all__ = ["Core", "Job", "Layout", "Policy", "Wish"]
