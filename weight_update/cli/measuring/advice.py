"""A recommendation, from measured figures only."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from weight_update.cli.measuring.rounds import Case, Results
from weight_update.text import format_number

_NETWORK = "distributed"


def case_row(case: Case, copies: Sequence[float]) -> dict[str, Any]:
    """Return the row of a case in the table."""
    low, median, high = quartiles(case.seconds)
    report = case.report
    return {
        "scheme": case.scheme,
        "encoding": case.encoding,
        "median_ms": median,
        "lower_quartile_ms": low,
        "upper_quartile_ms": high,
        "times_a_copy": None if median is None or not copies else median / (1e3 * statistics.median(copies)),
        "sent_bytes": None if report is None else report.wire_bytes,
        "longest_stall_ms": None if report is None else 1e3 * max(report.stall_seconds.values(), default=0.0),
        "updates": len(case.seconds),
        "problem": case.failure or None,
    }


def quartiles(seconds: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Return lower quartile, median and upper quartile in milliseconds; None without figures."""
    if not seconds:
        return None, None, None
    if len(seconds) == 1:
        return (1e3 * seconds[0],) * 3
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return 1e3 * low, 1e3 * median, 1e3 * high


def recommendation(results: Results) -> dict[str, str | None]:
    """Return the scheme and encoding to use on this machine, and the reason.

    The shortest median wins. Cases are in order of simplicity: the first whose lower quartile is not above
    that median is taken instead, because the difference lies within the spread.
    """
    cases = _measured(results)
    if not cases:
        return {"recommended_scheme": None, "recommended_encoding": None, "reason": "nothing was measured"}
    medians = {case.name: statistics.median(case.seconds) for case in cases}
    shown = {name: f"{format_number(1e3 * median)} ms" for name, median in medians.items()}
    best = min(cases, key=lambda case: medians[case.name])
    chosen = next(case for case in cases if (quartiles(case.seconds)[0] or 0.0) <= 1e3 * medians[best.name])
    others = sorted((case for case in cases if case is not chosen), key=lambda case: medians[case.name])
    reason = f"{shown[chosen.name]} per update"
    if results.copies:
        times = medians[chosen.name] / statistics.median(results.copies)
        reason += f", {format_number(times, 2)} times a plain copy"
    if chosen is not best:
        reason += f"; it is simpler than {best.name} ({shown[best.name]}), within the spread"
    elif others:
        reason += f"; the next is {others[0].name} with {shown[others[0].name]}"
    return {"recommended_scheme": chosen.scheme, "recommended_encoding": chosen.encoding, "reason": reason}


def _measured(results: Results) -> list[Case]:
    return [case for case in results.cases if case.seconds and not case.failure]


def network_advice(results: Results) -> str | None:
    """Return the speed of a link below which patches are faster than dense updates; None if not measured.

    A patch takes longer to make and saves bytes. At that speed, both times are equal.
    """
    found = {case.encoding: case for case in _measured(results) if case.scheme == _NETWORK}
    dense, patch = found.get("dense"), found.get("patch")
    if dense is None or patch is None or dense.report is None or patch.report is None:
        return None
    saved = (dense.report.wire_bytes - patch.report.wire_bytes) * dense.report.dense_bytes
    saved //= max(dense.report.wire_bytes, 1)  # for one host
    longer = statistics.median(patch.seconds) - statistics.median(dense.seconds)
    if saved <= 0:
        return "between machines: distributed with dense; a patch is not smaller"
    if longer <= 0:
        return "between machines: distributed with patch; it is faster even over loopback"
    speed = format_number(8 * saved / longer / 1e9, 2)
    return f"between machines: distributed with patch below {speed} Gbit/s, with dense on faster links"
