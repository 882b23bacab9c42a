"""Every target set for this library, and the table that says whether a run reached them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.report import Table

LIMITS = {
    # compare
    "SharedMem, 1 GB, 4 workers, of torchrl's time": 0.25,
    "SharedMem, 1 GB, 4 workers, of one plain copy": 1.5,
    "SharedMem, 1 GB, slowest / fastest of 1 to 8 workers": 1.25,
    "SharedMem, {size} MB, stall {where}, ms, {which}": 1.0,
    "SharedMem, memory at {size} MB, {workers}, of what is allowed": 1.0,
    "SharedMem, 1 MB, {workers}, of torchrl's time": 0.4,
    "SharedMem, 1 MB, {workers}, of the floor": 2.0,
    "SharedMem, 1 MB, 1 worker, ms": 0.4,
    "SharedMem, 1 MB, growth per worker, ms": 0.1,
    "MultiProcess, 1 GB, 4 workers, of torchrl's time": 0.5,
    "{scheme}, {tensors:,} tensors, of torchrl's SharedMem": 0.01,
    "SharedMem, {tensors:,} tensors of a transformer, ms": 8.0,
    # cluster
    "{scheme}, 1 GB, 4 workers, of torchrl's time": 0.35,
    "{scheme}, {tensors:,} tensors, of torchrl's time": 0.01,
    "Distributed, 1 MB, {workers}, ms": 2.0,
    "Distributed, 1 MB, {workers}, of torchrl's time": 0.25,
    "Distributed, a host each, 1 GB, time to 4 hosts / to 1": 2.0,
    "Ray, object store, {size}, {workers}, of torchrl's time": 1.0,
    "Ray, object store, a host each, 1 GB, {workers}, of Ray's put and get alone": 1.25,
    # collectors
    "{kind}, {width} units: seconds of a frame, of torchrl's with versions": 1.05,
    # hosts
    "1 GB to another host, {route}, of bare TCP's time": 1.25,
    "1 GB to another host, {route}, of torchrl's time": 0.7,
    "1 MB to another host, {route}, ms": 1.5,
    "1 MB to another host, {route}, of torchrl's time": 0.5,
    "four hosts over shaped links, of one": 1.1,
    # patch: 1 % of a model in bfloat16 changes by a few ulp
    "bytes of a changed element: flat, none": 3.2,
    "bytes of a changed element: flat, relative, none": 3.2,
    "bytes of a changed element: flat, zstd": 2.0,
    "bytes of a changed element: flat, relative, zstd": 2.0,
    "{variant}: bytes of an element of {update}": 1.25,
    "{variant}: bytes of an element of the {update}": 1.1,
    "seconds to apply a patch of 1 GB of weights: {variant}": 1.0,
    "building, of one copy: {variant}": 1.5,
    "building relative values, of one copy: {variant}": 1.7,
    "building compressed, of one copy: {variant}": 2.5,
    "building, 20% changed, of one copy: {variant}": 2.5,
    "building, of the obvious way: {variant}": 0.4,
    "applying, of one copy: {variant}": 0.5,
    "applying compressed, of one copy: {variant}": 1.0,
    # links
    "500 MB over 1gbit/s, {encoding}, of dense's time": 1 / 15,
    # pipeline
    "transfer-bound, {place}: 2 in flight, of serial": 1.03,
    "balanced, {place}: 2 in flight, of serial": 0.6,
    "conversion-bound, {place}: 2 in flight, of serial": 1.03,
    "{limit}, {place}: memory beyond the weights, of {chunks} chunks": 1.0,
    # engines: 1 % of a Qwen3 model changes
    "{state} engine, 10 Gbit/s: patch, of dense": 1 / 5,
    "busy engine: pause with a patch, of loading all": 0.1,
    # stores
    "{way}: write and read, of a copy with SHA-256": 1.5,
    "object store, patch: write and read, of torch.save and load": 0.5,
    # observers
    "1 MB, an observer added and removed, of none": 1.05,
}
"""The most that each figure may be. Names in braces are filled in by the benchmark."""


@dataclass(frozen=True)
class Target:
    """A target and the figure that a run reached.

    Attributes:
        name: what is compared with what.
        limit: the most that the figure may be.
        reached: the ratio of medians; infinite if this library failed, None if it was not measured.
        fastest: the ratio of the fastest turns, which must be within the limit too; None to judge by medians.
    """

    name: str
    limit: float
    reached: float | None
    fastest: float | None = None

    @property
    def met(self) -> str:
        """The verdict, as a cell."""
        if self.reached is None:
            return "not measured"
        return "yes" if max(self.reached, self.fastest or 0.0) <= self.limit else "no"


def target(template: str, reached: float | None, fastest: float | None = None, **names: object) -> Target:
    """Return the target that stands in :data:`LIMITS` as ``template``."""
    return Target(template.format(**names), LIMITS[template], reached, fastest)


def count_workers(count: int) -> str:
    """Return ``1 worker``, ``2 workers`` and so on."""
    return f"{count} worker{'s' * (count != 1)}"


def targets_table(
    targets: Iterable[Target],
    title: str = "Targets",
    note: str = 'Medians of this run, unless stated otherwise. A target "x, of y" limits x divided by y.',
) -> Table:
    """Return a table with one row for each target."""
    targets = list(targets)
    with_fastest = any(one.fastest is not None for one in targets)
    rows = [
        [one.name, f"<= {one.limit:.3g}", _show(one.reached), *[_show(one.fastest)] * with_fastest, one.met]
        for one in targets
    ]
    head = ["target", "limit", "reached", *["fastest"] * with_fastest, "met"]
    return Table(title, note, head, rows, verdicts=[(one.name, one.met) for one in targets])


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
