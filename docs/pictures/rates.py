"""The picture of updates over links of several rates, from the table of the benchmark."""

from __future__ import annotations

import math
import re
from pathlib import Path

from drawing import Drawing

_TABLE = Path(__file__).resolve().parent.parent / "tables" / "rates.rst"
_ROW = re.compile(r"^(\d+[kmg]bit) +(.+?)  +[\d.]+  +([\d.]+)  +([\d.]+)\b", re.MULTILINE)
_LEFT, _WIDTH, _ROW_HEIGHT, _BAR = 250, 400, 24, 14
_DECADES = range(5)  # of the axis: 1 ms to 10 s


def rates() -> str:
    """Return bars for the times of updates, with a line where the bytes alone would be; the axis is log."""
    rows = _ROW.findall(_TABLE.read_text(encoding="utf-8"))
    drawing = Drawing(
        "rates",
        _LEFT + _WIDTH + 80,
        60 + _ROW_HEIGHT * len(rows),
        "Time of an update over links of several rates: a bar for each encoding, and a line at the time that "
        "the link needs for the bytes.",
    )
    drawing.text(_LEFT, 20, "Time of an update; the coloured line is the time of the bytes on the link")
    if not rows:
        drawing.text(_LEFT, 44, "not measured yet")
    for decade in _DECADES if rows else ():
        drawing.text(_x(10**decade), 40, f"{10**decade:,} ms", "small middle")
    for number, (rate, encoding, link, taken) in enumerate(rows):
        top = 50 + number * _ROW_HEIGHT
        drawing.text(6, top + 12, f"{rate}/s, {encoding}")
        drawing.box(_LEFT, top, max(_x(float(taken)) - _LEFT, 1), _BAR)
        drawing.box(_x(float(link)), top - 2, 1, _BAR + 4, kind="weights")
        drawing.text(_x(float(taken)) + 8, top + 12, f"{float(taken):,.0f} ms")
    return drawing.svg()


def _x(milliseconds: float) -> int:
    """Return the place on the axis; times below a millisecond are at its beginning."""
    decades = math.log10(max(milliseconds, 1.0)) / (len(_DECADES) - 1)
    return round(_LEFT + _WIDTH * min(decades, 1.0))
