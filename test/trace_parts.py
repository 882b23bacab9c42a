"""Rules of the *Trace Event Format* and of the viewers that read it, for the traces of an observer."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

TraceEvent = dict[str, Any]

FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "X": {"dur": lambda dur: isinstance(dur, int) and dur > 0, "args": lambda args: "version" in args},
    "M": {"args": lambda args: isinstance(args["name"], str) and args["name"] != ""},
    "i": {"s": lambda scope: scope == "t", "args": lambda args: "reason" in args},
    "C": {"args": lambda args: all(isinstance(value, (int, float)) for value in args.values())},
    "s": {"id": lambda id: isinstance(id, int), "cat": lambda cat: isinstance(cat, str)},
    "f": {
        "id": lambda id: isinstance(id, int),
        "cat": lambda cat: isinstance(cat, str),
        "bp": lambda bp: bp == "e",  # otherwise the arrow ends at the next slice that begins
    },
}
"""The further fields that each phase needs, and what they may be."""


class Trace:
    """The events of a trace file."""

    def __init__(self, path: Path) -> None:
        self.events: list[TraceEvent] = json.loads(path.read_text())
        self.tracks = {e["tid"]: e["args"]["name"] for e in self.events if e["name"] == "thread_name"}

    def of(self, phase: str) -> list[TraceEvent]:
        return [event for event in self.events if event["ph"] == phase]

    def slices(self, version: int, track: str, since: float) -> dict[str, tuple[int, int]]:
        """Return start and end of the slices, by name, in microseconds after ``since``."""
        zero = round(1e6 * since)
        return {
            e["name"]: (e["ts"] - zero, e["ts"] - zero + e["dur"])
            for e in self.of("X")
            if e["args"]["version"] == version and self.tracks[e["tid"]] == track
        }

    def check(self) -> None:
        """Check each event, the slices of each track, and that each arrow leads from a slice to a slice."""
        for event in self.events:
            check_event(event)
            assert event["ph"] == "M" or event["tid"] in self.tracks, f"its track has no name: {event}"
        assert len(self.of("M")) == len(self.tracks) + 1, "one name for each track, and one for the process"
        for track in self.tracks:
            spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in self.of("X") if e["tid"] == track)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        for start, end in self.arrows():
            assert start["ts"] <= end["ts"]
            for arrow, name in ((start, "send"), (end, "swap")):
                slice_ = self.around(arrow)
                assert (slice_["name"], slice_["args"]["version"]) == (name, arrow["id"])

    def arrows(self) -> list[tuple[TraceEvent, TraceEvent]]:
        """Return the start and the end of each arrow; both have the same id, category and name."""
        found: dict[tuple[Any, ...], list[TraceEvent]] = defaultdict(list)
        for event in self.events:
            if event["ph"] in "stf":
                found[event["id"], event["cat"], event["name"]].append(event)
        for key, ends in found.items():
            assert [event["ph"] for event in ends] == ["s", "f"], key
        return [(start, end) for start, end in found.values()]

    def around(self, arrow: TraceEvent) -> TraceEvent:
        """Return the slice that an end of an arrow binds to: the only one that encloses it.

        At the moment at which one slice ends and another begins, Perfetto takes the one that begins, and
        chrome://tracing the one that ends.
        """
        (slice_,) = (
            e
            for e in self.of("X")
            if (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])
            and e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"]
        )
        return slice_


def check_event(event: TraceEvent) -> None:
    """Check the fields of one event."""
    assert event["ph"] in FIELDS, event
    assert isinstance(event["name"], str), event
    for field in ("pid", "tid"):
        assert type(event[field]) is int, event
    assert 0 <= event["ts"] < 2**51, (
        event
    )  # JavaScript reads numbers as doubles, which have halves up to there
    assert (2 * event["ts"]) % (1 if event["ph"] in "sf" else 2) == 0, event
    for field, holds in FIELDS[event["ph"]].items():
        assert holds(event[field]), (field, event)
