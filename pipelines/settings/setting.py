"""The definition of a setting: its default, its description, and whether a resume may change it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo


class Settings(BaseModel):
    """A frozen group of settings that refuses unknown names and non-finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SettingEntry(NamedTuple):
    """One setting with its full name, such as `checkpoint.every`, and the group that it is in."""

    name: str
    field: FieldInfo
    group: type[Settings]
    is_resumable: bool


def setting(default: Any, description: str, *, resumable: bool = False) -> Any:
    """A field of a group of settings.

    A resumed run may change it if `resumable`. For a group this holds for all settings in it.
    """
    return Field(default, description=description, json_schema_extra={"resumable": resumable})


def entries_of(
    group: type[Settings], prefix: str = "", is_resumable: bool = False
) -> Iterator[SettingEntry]:
    """Every setting of a group: first its own, then those of the groups in it."""
    inner_groups = []
    for field_name, field in group.model_fields.items():
        extra = field.json_schema_extra
        may_change = is_resumable or (isinstance(extra, dict) and extra.get("resumable") is True)
        name = prefix + field_name
        inner = list(_groups_in(field.annotation))
        inner_groups += [(kind, name, may_change) for kind in inner]
        if not inner:
            yield SettingEntry(name, field, group, may_change)
    for kind, name, may_change in inner_groups:
        yield from entries_of(kind, f"{name}.", may_change)


def _groups_in(annotation: Any) -> Iterator[type[Settings]]:
    """The groups that a type names: itself, or alternatives of a union."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    for part in get_args(annotation):
        yield from _groups_in(part)
