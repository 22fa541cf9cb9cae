"""Segments: the objects that make up a log on an object store, and which of them are in force.

A segment's name carries its writer's epoch and the byte of the log at which it begins, so two
writers never write the same object. A writer of a newer epoch begins at the byte up to which it has
read the log. Everything that an older epoch has written, or writes later, from that byte on is
superseded. A compacted segment replaces the bytes up to the end that its name carries, whatever its
own size is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

_NAME = re.compile(r"(?:(\d{8,})-)?(\d{16,})(?:-(\d{16,}))?")


@dataclass(frozen=True)
class LogSegment:
    """The bytes `begin` to `end` of a log, in the object `name`, which begins at `object_begin`."""

    name: str
    epoch: int
    begin: int
    end: int
    object_begin: int = 0
    is_compacted: bool = False
    """It has fewer bytes than it replaces, and is read as a whole."""
    is_joined: bool = False
    """It replaces several others, compacted or byte for byte."""


def segment_name(log: str, epoch: int, begin: int, end: int | None = None) -> str:
    """The name of a segment; `end` is given only if it replaces several others."""
    name = f"{log}/{epoch:08d}-{begin:016d}"
    return name if end is None else f"{name}-{end:016d}"


def parse_segments(files: Mapping[str, int]) -> list[LogSegment]:
    """All segments among these files (name: size in bytes), superseded ones as well."""
    segments = []
    for name, size in files.items():
        match = _NAME.fullmatch(name.rpartition("/")[2])
        if match:
            epoch, begin = int(match[1] or 0), int(match[2])
            end = begin + size if match[3] is None else int(match[3])
            is_compacted, is_joined = end != begin + size, match[3] is not None
            segments.append(LogSegment(name, epoch, begin, end, begin, is_compacted, is_joined))
    return segments


def segments_in_force(segments: Iterable[LogSegment]) -> list[LogSegment]:
    """The segments that readers use, in the order of the log, without overlaps and empty ones.

    If a segment ends before the next begins, the bytes between them are lost.
    """
    segments = list(segments)
    limits = _begins_of_newer_epochs(segments)
    valid = []
    for segment in segments:
        limit = limits.get(segment.epoch, segment.end)
        if segment.end > limit and segment.is_compacted:
            continue  # its writer had lost the lease, so the segments that it compacted remain
        if segment.begin < min(segment.end, limit):
            valid.append(replace(segment, end=min(segment.end, limit)))
    valid.sort(key=lambda segment: (segment.begin, -segment.end))
    chosen: list[LogSegment] = []
    for segment in valid:
        position = chosen[-1].end if chosen else 0
        if segment.end <= position or (segment.is_compacted and segment.begin < position):
            continue  # left over from a compaction that was interrupted
        chosen.append(replace(segment, begin=max(segment.begin, position)))
    return chosen


def _begins_of_newer_epochs(segments: Iterable[LogSegment]) -> dict[int, int]:
    """By epoch, the first byte that a newer epoch has written; the newest epoch has no entry."""
    begins: dict[int, int] = {}
    for segment in segments:
        begins[segment.epoch] = min(segment.begin, begins.get(segment.epoch, segment.begin))
    newest_first = sorted(begins, reverse=True)
    limits: dict[int, int] = {}
    for newer, epoch in pairwise(newest_first):
        limits[epoch] = min(begins[newer], limits.get(newer, begins[newer]))
    return limits
