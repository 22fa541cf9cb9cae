"""What a person sees of a run: the terminal's display and the timeline picture."""

from pipelines.view.display import Display
from pipelines.view.history import History, read_history
from pipelines.view.timeline import draw, render

__all__ = ["Display", "History", "draw", "read_history", "render"]
