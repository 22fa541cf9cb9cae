"""The names of a run's files and folders, shared by writers and readers."""

from __future__ import annotations

JOURNAL, METRICS, SYSTEM = "journal.jsonl", "metrics.jsonl", "system.jsonl"
STATISTICS = "statistics.jsonl"
PROFILES, TRACE = "profiles", ".json.gz"
