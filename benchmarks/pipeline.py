"""Updates that are converted on the way: strictly serial against chunks in a pipeline.

::

    python -m benchmarks.pipeline                  # about six minutes; as root, to have a slow link too
    python -m benchmarks.pipeline --quick          # half a minute, to see that it works
    python -m benchmarks.pipeline --rst docs/benchmark_pipeline.rst
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.network import why_not
from benchmarks.pipeline_sides import PLACES, Place, Side, balance, connected
from benchmarks.pipeline_work import WORKS, Work, both_cores, make_weights
from benchmarks.report import Figure, Table, machine, ratio, show_ratio, to_rst, to_text

__all__ = ["main"]

LIMITS: tuple[int | None, ...] = (1, 2, 4, None)
_CHUNKS = 24
_WARM = 1
_BALANCED, _NEVER_ABOVE = 0.6, 1.03


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print; returns the exit status."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    facts = machine(("torch", "tensordict"))
    computing, copying = both_cores()
    facts.append(
        f"Two processes at once, of one after the other: {computing:.2f} where one computes and one copies, "
        f"{copying:.2f} where both copy. A pipeline within this machine cannot do better"
    )
    print("\n".join(facts) + "\n", flush=True)
    reason = why_not()
    tables, ratios, memory = [], dict[tuple[str, str], Mapping[str, float | None]](), list[list[str]]()
    for place in PLACES:
        if place.shaped and reason is not None:
            print(f"without {place.name}: {reason}", file=sys.stderr)
            continue
        megabytes = options.megabytes / (8 if place.shaped else 1)
        with connected(place, LIMITS, make_weights(megabytes, 4 * _CHUNKS), _CHUNKS) as sides:
            table, found = _times(place, megabytes, sides, options.turns)
            memory += _memory(place, sides)
        ratios |= {(place.name, work): rates for work, rates in found.items()}
        tables.append(table)
        print(to_text(table), flush=True)
    for table in (_memory_table(memory), _targets(ratios, memory)):
        print(to_text(table), flush=True)
        tables.append(table)
    if options.rst is not None:
        options.rst.write_text(to_rst(facts, tables, by="benchmarks.pipeline"))
    return 0


def _times(
    place: Place, megabytes: float, sides: list[Side], turns: int
) -> tuple[Table, dict[str, Mapping[str, float | None]]]:
    serial = sides[0]
    work = Work()
    rows, found = [], {}
    for name, share in WORKS.items():
        work = balance(work, serial, share)
        print(f"... {place.name}, {name}: {work}", file=sys.stderr, flush=True)
        seconds: dict[str, list[float]] = {side.name: [] for side in sides}
        parts: list[tuple[float, float]] = []
        for turn in range(_WARM + turns):
            for side in sides:
                start = time.perf_counter()
                report = side.send(work)
                if turn >= _WARM:
                    seconds[side.name].append(time.perf_counter() - start)
                    if side is serial:
                        spent = report.seconds
                        parts.append((spent["convert"] + spent["encode"], spent["send"] + spent["ack"]))
        figures = {name: Figure(tuple(values)) for name, values in seconds.items()}
        first = figures[serial.name]
        found[name] = {label: ratio(one, first) for label, one in figures.items()}
        made, moved = (Figure(tuple(values)) for values in zip(*parts, strict=True))
        cells = [name, made.show(1e3, 0), moved.show(1e3, 0)]
        for label, figure in figures.items():
            cells += [figure.show(1e3, 0), *([] if label == serial.name else [show_ratio(figure, first)])]
        rows.append(cells)
    for side in sides:
        side.require_same(work)
    head = ["work", "convert, encode", "transfer"]
    for side in sides:
        head += [side.name, *([] if side is serial else ["of serial"])]
    note = (
        f"Milliseconds from send() until applied, median (least .. most) of {turns} turns, interleaved.\n"
        f"Bfloat16, {_CHUNKS} chunks. The second and third column are of the serial side."
    )
    return Table(f"{megabytes:.0f} MB through {place.name}", note, head, rows), found


def _memory(place: Place, sides: list[Side]) -> list[list[str]]:
    """Peak memory of the sender while it sends, beyond what its weights take."""
    if place.shaped:
        return []
    return [
        [place.name, side.name, f"{side.chunk_megabytes:.2f}", *(f"{mb:.2f}" for mb in side.peak_megabytes())]
        for side in sides
    ]


def _memory_table(rows: list[list[str]]) -> Table:
    note = (
        "MB: the largest chunk; the slots that chunks lie in; the most that converted tensors took which\n"
        'were not yet copied into one. "whole" keeps a version for whoever comes later.'
    )
    return Table(
        "Memory of the sender while it sends", note, ["place", "side", "chunk", "slots", "converted"], rows
    )


def _targets(ratios: Mapping[tuple[str, str], Mapping[str, float | None]], memory: list[list[str]]) -> Table:
    rows = []
    for (place, work), rates in ratios.items():
        pair = rates["2 in flight"]
        if pair is None:
            continue
        limit = _BALANCED if work == "balanced" else _NEVER_ABOVE
        rows.append(
            [f"{work}, {place}: 2 in flight of serial", f"{limit:.2f}", f"{pair:.2f}", _met(pair <= limit)]
        )
    for place, side, chunk, slots, converted in memory:
        if side == "whole":
            continue
        count = 1 if side == "serial" else int(side.split()[0])
        most = (count + 1) * float(chunk)
        total = float(slots) + float(converted)
        rows.append(
            [f"{side}, {place}: MB beyond the weights", f"{most:.2f}", f"{total:.2f}", _met(total <= most)]
        )
    note = (
        "A chunk for each in flight, and the one that is being filled may lie twice: converted, and copied."
    )
    return Table("Targets", note, ["target", "at most", "reached", "met"], rows)


def _met(good: bool) -> str:
    return "yes" if good else "no"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--megabytes", type=float, help="of bfloat16 weights; default: 480, a link gets an eighth"
    )
    parser.add_argument("--turns", type=int, help="how often each thing is timed; default: 9")
    parser.add_argument("--quick", action="store_true", help="24 MB, 2 turns")
    parser.add_argument("--rst", type=Path, metavar="FILE", help="write the tables there as well")
    options = parser.parse_args(arguments)
    options.megabytes = options.megabytes or (24.0 if options.quick else 480.0)
    options.turns = options.turns or (2 if options.quick else 9)
    return options


if __name__ == "__main__":
    raise SystemExit(main())
