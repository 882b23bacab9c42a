"""Reports of updates as plain values, which calls to a synchronizer carry."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from weight_update.report import SyncReport


def plain_of(report: SyncReport) -> dict[str, Any]:
    """Return the fields of a report."""
    return asdict(report)


def report_of(plain: dict[str, Any]) -> SyncReport:
    """Return the report with these fields; the keys of explorers may be texts, as in JSON."""
    by_worker = {
        name: {int(id): value for id, value in plain[name].items()}
        for name in ("apply_seconds", "stall_seconds", "failures")
    }
    return SyncReport(**{**plain, **by_worker})
