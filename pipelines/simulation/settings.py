"""The settings of a simulation: what the parts of a run cost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, ValidationError

from elastic.simulation.costs import Costs
from pipelines.errors import UserError
from pipelines.settings.overrides import first_problem, similar_names
from pipelines.settings.setting import Settings, setting

DEFAULT = Costs()
Group = TypeVar("Group", bound=Settings)


class CostSettings(Settings):
    """What the parts of a run cost, in seconds and bytes a second."""

    step_s: PositiveFloat = setting(
        DEFAULT.step_s,
        "A step with all workers. With fewer, the planner's step cost scales it.",
    )
    first_step_s: NonNegativeFloat = setting(
        DEFAULT.first_step_s, "What the first step after a pause takes longer."
    )
    warm_up_s: NonNegativeFloat = setting(
        DEFAULT.warm_up_s, "From the arrival of a node until its worker is ready."
    )
    detect_s: NonNegativeFloat = setting(
        DEFAULT.detect_s,
        "From the loss of a node without notice until the controller knows. A machine that "
        "vanishes silently takes 4 s, a process whose connections close 0.05 s.",
    )
    unwind_s: NonNegativeFloat = setting(
        DEFAULT.unwind_s, "How long the survivors take to unwind after an abort."
    )
    form_s: NonNegativeFloat = setting(DEFAULT.form_s, "How long process groups take to form.")
    bytes_per_s: PositiveFloat = setting(
        DEFAULT.bytes_per_s, "Bytes a second of state that one worker sends or receives."
    )
    storage_bytes_per_s: PositiveFloat = setting(
        DEFAULT.storage_bytes_per_s,
        "Bytes a second that one worker writes to storage, or reads.",
    )
    save_s: NonNegativeFloat = setting(
        DEFAULT.save_s, "What a checkpoint adds to the step that follows it."
    )
    snapshot_s: NonNegativeFloat = setting(
        DEFAULT.snapshot_s, "What a snapshot adds to its step, where snapshots are needed."
    )
    on_demand_start_s: NonNegativeFloat = setting(
        DEFAULT.on_demand_start_s, "From the request of an on-demand machine until it is there."
    )
    on_demand_nodes: NonNegativeInt = setting(
        DEFAULT.on_demand_nodes, "The most on-demand machines at once."
    )


def read_costs(
    measured: Mapping[str, float],
    path: str | None,
    changes: Sequence[str],
    step_s: float | None,
) -> Costs:
    """The measured costs, then those of a JSON file, then `key=value` changes, then `--step-s`.
    Raises `UserError`."""
    values: dict[str, Any] = dict(measured)
    if path is not None:
        values |= _read_object(path)
        group_of(CostSettings, values, f"--costs {path}")
    for change in changes:
        values |= parse_pair(change, "--cost", CostSettings)
    if step_s is not None:
        values["step_s"] = step_s
    return Costs(
        **group_of(
            CostSettings, values, "--step-s" if step_s is not None else "--cost"
        ).model_dump()
    )


def parse_pair(text: str, option: str, group: type[Settings]) -> dict[str, str]:
    """One `key=value` of a group of settings. Raises `UserError`."""
    key, equals, value = text.partition("=")
    example = next(iter(group.model_fields))
    if not equals:
        raise UserError(f"{option} {text}: write key=value, e.g. {example}=1")
    return {key.strip(): value.strip()}


def group_of(group: type[Group], values: Mapping[str, Any], where: str) -> Group:
    """A group of settings from its values. Raises `UserError`: its message begins with `where`."""
    for key in values:
        if key not in group.model_fields:
            similar = similar_names(key, list(group.model_fields))
            raise UserError(f"{where}: there is no {key}; {similar}")
    try:
        return group.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{where}: {first_problem(error)}") from None


def _read_object(path: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--costs {path}: cannot be read ({error}); give a JSON object") from None
    if not isinstance(content, dict):
        raise UserError(f"--costs {path}: give a JSON object such as " + '{"step_s": 2.0}')
    return content
