"""The targets set for patches, and whether a run reached them."""

from __future__ import annotations

from benchmarks.patch_times import FEW, Times, Variant
from benchmarks.report import Figure, Table, ratio

__all__ = ["targets_table"]


def targets_table(times: Times) -> Table:
    """The targets set for 1 % of a model in bfloat16 that moves by a few ulp, and whether they are met."""
    plain, usual, small = FEW
    rows = [
        _size_row(times, plain, 3.2),
        _size_row(times, usual, 3.2),
        _size_row(times, ("flat", "zstd"), 2.0),
        _size_row(times, small, 2.0),
    ]
    copy, obvious_way = times.copy, times.figure("obvious")
    for variant in (plain, usual, small):
        build, apply = times.build(variant), times.figure(("apply", variant))
        name = ", ".join(variant)
        rows += [
            _time_row(f"building, of one copy: {name}", build, copy, 2.5),
            _time_row(f"building, of the obvious way: {name}", build, obvious_way, 0.4),
            _time_row(f"applying, of one copy: {name}", apply, copy, 1.0),
        ]
    note = (
        f"{times.update}. A time is within its limit if the ratios of medians and of fastest turns both are."
    )
    return Table("Targets", note, ["target", "limit", "reached", "fastest", "met"], rows)


def _size_row(times: Times, variant: Variant, limit: float) -> list[str]:
    reached = times.bytes_each(variant)
    what = f"bytes of a changed element: {', '.join(variant)}"
    return [what, f"<= {limit:g}", f"{reached:.3g}", "-", _verdict(reached <= limit)]


def _time_row(what: str, one: Figure, other: Figure, limit: float) -> list[str]:
    """What disturbs the machine disturbs a copy by several threads most: medians alone could flatter."""
    by_median, fastest = ratio(one, other), min(one.values) / min(other.values)
    reached = by_median or 0.0
    return [
        what,
        f"<= {limit:g}",
        f"{reached:.3g}",
        f"{fastest:.3g}",
        _verdict(max(reached, fastest) <= limit),
    ]


def _verdict(met: bool) -> str:
    return "yes" if met else "no"
