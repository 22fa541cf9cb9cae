"""Generator of the tables and the diagram in `docs/phases.md`: phases, transitions, policy.

python docs/make_phases.py            writes the page
python docs/make_phases.py --check    exits with 1 if the page is out of date
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import fields
from inspect import getsource

from generated import ROOT, keep

from elastic.protocol.phases import TRANSITIONS, Ended, Waiting
from elastic.protocol.policy import Policy
from pipelines.run.options import policy_of
from pipelines.settings import TrainSettings

PAGE = ROOT / "docs" / "phases.md"
FROM_THE_RUN = {
    "gang_jitter": "0 to 1",
    "checkpoint_every_s": "by `checkpoint.every`",
    "checkpoint_auto": "by `checkpoint.every`",
}
"""Numbers of the policy that differ between runs."""


def diagram(transitions: Mapping[type, tuple[tuple[type, str], ...]]) -> str:
    """The table of transitions as a Mermaid state diagram."""
    arrows = [
        f"    {phase.__name__} --> {successor.__name__}: {cause}"
        for phase, successors in transitions.items()
        for successor, cause in successors
    ]
    ends = [f"    [*] --> {Waiting.__name__}", *arrows, f"    {Ended.__name__} --> [*]"]
    return "\n".join(["```mermaid", "stateDiagram-v2", *ends, "```"])


def phases(transitions: Mapping[type, object]) -> str:
    """One row for each phase: its meaning and the data that it carries."""
    rows = [
        f"| {phase.__name__} | {_one_line(phase.__doc__)} "
        f"| {', '.join(f'`{field.name}`' for field in fields(phase))} |"
        for phase in transitions
    ]
    return "\n".join(["| phase | meaning | data |", "|---|---|---|", *rows])


def policy() -> str:
    """One row for each number of the policy that is no setting: its value and its meaning."""
    users = policy_of(TrainSettings(), 1, 1, "run")
    values = {n: getattr(users, n) for n, _ in _field_docstrings(Policy)} | FROM_THE_RUN
    rows = [
        f"| `{name}` | {_shown(values[name])} | {meaning} |"
        for name, meaning in _field_docstrings(Policy)
    ]
    return "\n".join(["| number | value | meaning |", "|---|---|---|", *rows])


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _field_docstrings(kind: type) -> Iterator[tuple[str, str]]:
    """Each field that has a string below it, with that string."""
    [definition] = ast.parse(getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    name = ""
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
        elif name and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            yield name, _one_line(statement.value.value)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    keep(PAGE, {"diagram": diagram(TRANSITIONS), "phases": phases(TRANSITIONS), "policy": policy()})
