"""Weights on a GPU: dense and patch, to the CPU's memory and to a worker on the GPU, also by CUDA IPC.

Needs torch and tensordict alone; nvCOMP is measured where the extra ``nvcomp`` is installed. Without
a CUDA device it says so and exits with status 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.options import Options
from benchmarks.report import Figure, Table, Times, Unable, machine, say, show_ratio
from benchmarks.rlinf import DocumentedPatch, apply
from benchmarks.updates import (
    Key,
    Sent,
    Update,
    by_chance,
    layered,
    measure_schemes,
    obvious,
    sent_table,
    stages,
)
from weight_update import (
    BucketEncoding,
    DistributedWeightSyncScheme,
    Encoding,
    PatchEncoding,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
)
from weight_update.compression import resolve_compression
from weight_update.encodings import DenseEncoding, Difference
from weight_update.encodings.dense import copy_together
from weight_update.encodings.patch.format import decode_patch
from weight_update.transports.shared_memory.slots import HostSlotMapping, SharedBuffer
from weight_update.wire.memory import pin
from weight_update.wire.schema import WeightSchema

QUICK = "20 MB, 2 turns, 1 %% changed only"

Device = Literal["cpu", "cuda"]
_PLACES: tuple[Device, ...] = ("cpu", "cuda")
_BUILD, _APPLY = "RLinf: build", "RLinf: apply"


@dataclass(frozen=True)
class Variant:
    """Options of :class:`PatchEncoding` that say how a patch is built."""

    snapshot_device: Device
    transport_device: Device
    compression: str
    values: Literal["raw", "relative"]

    @property
    def encoding(self) -> PatchEncoding:
        return PatchEncoding(**vars(self))


def _times(device: torch.device) -> Times:
    """Return times of actions that begin and end with an idle device."""
    if device.type != "cuda":
        return Times()
    return Times(settle=lambda: torch.cuda.synchronize(device))


def measure_dense(weights: dict[str, torch.Tensor], device: torch.device, turns: int) -> Times:
    """Time the copies of a dense update on each side, beside plain copies of the same bytes."""
    times, schema = _times(device), WeightSchema.of(weights)
    times.nbytes["model"] = nbytes = schema.nbytes
    live = [tensor.to(device) for tensor in weights.values()]
    there, pageable = (torch.zeros(nbytes, dtype=torch.uint8, device=place) for place in (device, "cpu"))
    pinned = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    copy_together(schema.views(there), live)
    buffer = SharedBuffer(nbytes)
    pin(buffer.tensor)
    mapping, encoder = HostSlotMapping(buffer.key, buffer.fd), DenseEncoding().encoder(schema)
    slot, pinned_views, opened = buffer.tensor, schema.views(pinned), mapping.first(nbytes)
    for _ in range(1 + turns):
        times.add("dense: encode into a shared slot", lambda: encoder.encode(live, lambda _: slot))
        times.add(
            "plain: tensors to pinned memory",
            lambda: torch._foreach_copy_(pinned_views, live, non_blocking=True),
        )
        times.add("plain: one buffer to pinned memory", lambda: pinned.copy_(there, non_blocking=True))
        times.add("plain: one buffer to pageable memory", lambda: pageable.copy_(there))
        times.add("dense: receive from a shared slot", lambda: there.copy_(mapping.pinned(opened)))
        times.add("plain: one buffer from pinned memory", lambda: there.copy_(pinned, non_blocking=True))
        times.add("plain: one buffer from pageable memory", lambda: there.copy_(pageable))
    buffer.close()
    return times


def dense_table(megabytes: float, times: Times) -> Table:
    """Return a table of copies; ratios are to the copy of one buffer to or from pinned memory."""
    rows = []
    for what in times.seconds:
        figure = times.figure(what)
        plain = times.figure(f"plain: one buffer {'from' if ' from ' in what else 'to'} pinned memory")
        speed = times.nbytes["model"] / (figure.median or 1.0) / 1e9
        shown = figure.show(1e3, 2) if what.startswith("plain") else figure.cell(1e3, 2)
        rows.append([what, shown, f"{speed:.1f}", show_ratio(figure, plain, 2)])
    note = "Milliseconds, median (min .. max). Weights on the GPU, slots in host memory."
    return Table(f"Dense, {megabytes:.0f} MB", note, ["copy", "ms", "GB/s", "of a pinned copy"], rows)


class _Build:
    """A tracker that knows the weights before the update, and memory for its payloads."""

    def __init__(self, variant: Variant, schema: WeightSchema, old: Sequence[torch.Tensor]) -> None:
        self._variant, self._schema = variant, schema
        self._tracker = variant.encoding.tracker(schema, None)
        self._tracker.begin(old)
        self._slot: SharedBuffer | None = None

    def turn(self, times: Times, new: Sequence[torch.Tensor], receiver: torch.Tensor) -> None:
        """Compare, encode and apply."""
        found = times.add(("scan", self._variant), lambda: self._tracker.compare(new))
        payload = times.add(("encode", self._variant), lambda: self._encode(found))
        times.add(("apply", self._variant), lambda: self._apply(payload, receiver))
        times.nbytes[self._variant] = payload.numel()
        times.nbytes["changed"] = found.changed

    def _encode(self, found: Difference) -> torch.Tensor:
        payload = self._tracker.encode(found, 0, 1, self._allocate)
        assert payload is not None
        return payload

    def _apply(self, payload: torch.Tensor, receiver: torch.Tensor) -> None:
        decode_patch(payload, self._schema, receiver.device).write(receiver)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """Return the same shared slot in every turn, as an update over shared memory does."""
        if self._slot is None:
            self._slot = SharedBuffer(nbytes + nbytes // 8)
            pin(self._slot.tensor)
        return self._slot.tensor[:nbytes]

    def close(self) -> None:
        if self._slot is not None:
            self._slot.close()


def measure_build(update: Update, variants: Iterable[Variant], device: torch.device, turns: int) -> Times:
    """Time every variant, the obvious way and RLinf's documented way, in turns.

    Raises:
        RuntimeError: a patch did not lead to the new weights.
    """
    times, schema = _times(device), update.schema
    old, new = ([tensor.to(device) for tensor in one.values()] for one in (update.old, update.new))
    before, expected = (update.flat(one).to(device) for one in (update.old, update.new))
    receiver, pinned = before.clone(), torch.zeros_like(before, device="cpu")
    pinned = pinned.pin_memory() if device.type == "cuda" else pinned
    builds = {variant: _Build(variant, schema, old) for variant in variants}
    documented = {place: DocumentedPatch(old, place, device) for place in _PLACES}
    views = schema.views(receiver)
    for _ in range(1 + turns):
        times.add("copy", lambda: pinned.copy_(expected, non_blocking=True))
        times.add("obvious", lambda: obvious(old, new))
        for place, rival in documented.items():
            receiver.copy_(before)
            fields = times.add((_BUILD, place), lambda rival=rival: rival.build(new))
            times.add((_APPLY, place), lambda fields=fields: apply(fields, views))
            times.nbytes[_BUILD, place] = fields.nbytes
            _require_equal(receiver, expected, update, f"RLinf's way, snapshot_device={place!r},")
        for variant, build in builds.items():
            receiver.copy_(before)
            build.turn(times, new, receiver)
            _require_equal(receiver, expected, update, f"the patch of {variant}")
    for build in builds.values():
        build.close()
    return times


def _require_equal(found: torch.Tensor, expected: torch.Tensor, update: Update, what: str) -> None:
    if not torch.equal(found, expected):
        raise RuntimeError(f"{update.name}: {what} did not lead to the new weights")


def build_table(update: str, times: Times) -> Table:
    """Return a table with one row for each variant."""
    copy, plain = times.figure("copy"), times.figure("obvious")
    rows: list[list[object]] = []
    for what, figure in (("one copy to pinned memory", copy), ("the obvious way", plain)):
        rows.append([what, *["-"] * 6, figure.show(1e3, 2), *["-"] * 4])
    changed = max(times.nbytes["changed"], 1)
    for place in _PLACES:
        build, apply = times.figure((_BUILD, place)), times.figure((_APPLY, place))
        size = f"{times.nbytes[_BUILD, place] / changed:.2f}"
        shown = [size, "-", build.show(1e3, 2), apply.show(1e3, 2), show_ratio(build, copy, 2)]
        rows.append(["RLinf's way", place, "cpu", "-", "-", *shown, "-", "-"])
    for variant in (key for key in times.nbytes if isinstance(key, Variant)):
        scan, apply = times.figure(("scan", variant)), times.figure(("apply", variant))
        build = times.figure(("scan", variant), ("encode", variant))
        theirs = times.figure((_BUILD, variant.snapshot_device))
        each = Figure([times.nbytes[variant] / changed]).cell()
        cells = [each, *(figure.cell(1e3, 2) for figure in (scan, build, apply))]
        ratios = [show_ratio(*pair, 2) for pair in ((build, copy), (plain, build), (theirs, build))]
        rows.append(["ours", *vars(variant).values(), *cells, *ratios])
    note = (
        "Milliseconds, median (min .. max). B: bytes for each changed element. Build is scan and encode,\n"
        "into a shared slot; apply is decode and write, into weights on the GPU. The obvious way finds\n"
        "positions and values with (a != b).nonzero() and leaves them on the GPU. RLinf's way follows\n"
        "its documentation, not its code. RLinf/build: for the same place of the snapshot."
    )
    head = ["way", "snapshot", "transport", "compression", "values", "B", "scan", "build", "apply"]
    head += ["build/copy", "obvious/build", "RLinf/build"]
    return Table(f"Patches: {update}", note, head, rows, (0, 1, 2, 3, 4))


SCHEMES = {"SharedMem": SharedMemWeightSyncScheme, "Distributed": DistributedWeightSyncScheme}


def _encodings(device: torch.device) -> dict[str, str | Encoding]:
    found: dict[str, str | Encoding] = {"dense": "dense", "patch": PatchEncoding()}
    if device.type == "cuda":
        found["patch, snapshot on the GPU"] = PatchEncoding(snapshot_device="cuda")
    return found


def _measure(
    update: Update, device: torch.device, turns: int, schemes: Mapping[Key, WeightSyncScheme]
) -> dict[Key, list[Sent]]:
    """Turn the weights from old to new or back in each turn, and send them by every scheme."""
    states = [[value.to(device) for value in one.values()] for one in (update.old, update.new)]
    live = {name: value.clone() for name, value in zip(update.old, states[0], strict=True)}

    def advance(turn: int) -> None:
        torch._foreach_copy_(list(live.values()), states[1 - turn % 2])

    return measure_schemes(schemes, live, advance, turns, device=str(device))


def _measure_sync(update: Update, device: torch.device, turns: int) -> dict[Key, list[Sent]]:
    schemes = {
        (name, label): SCHEMES[name](strategy=WeightStrategy("state_dict", encoding=encoding))
        for name in SCHEMES
        for label, encoding in _encodings(device).items()
    }
    return _measure(update, device, turns, schemes)


HOST = "host memory"
_BUCKETS = 8


def _strategies(nbytes: int) -> dict[str, WeightStrategy]:
    buckets = BucketEncoding(bucket_size=max(nbytes // _BUCKETS, 64))
    return {
        "dense": WeightStrategy("state_dict"),
        "bucket": WeightStrategy("state_dict", encoding=buckets),
        "bucket, 2 in flight": WeightStrategy("state_dict", encoding=buckets, max_in_flight=2),
    }


def _measure_colocated(update: Update, device: torch.device, turns: int) -> dict[Key, list[Sent]]:
    """Measure every strategy with slots in host memory and, where there is one, on the GPU."""
    places = {HOST: None, "the GPU": str(device)} if device.type == "cuda" else {HOST: None}
    schemes = {
        (place, label): SharedMemWeightSyncScheme(strategy, slot_device=slot_device)
        for label, strategy in _strategies(WeightSchema.of(update.old).nbytes).items()
        for place, slot_device in places.items()
    }
    return _measure(update, device, turns, schemes)


def _measure_copy(update: Update, device: torch.device, turns: int) -> Figure:
    """Time one plain copy of all tensors into a flat buffer on the device, which every update needs."""
    schema = WeightSchema.of(update.old)
    live = [value.to(device) for value in update.old.values()]
    views = schema.views(torch.zeros(schema.nbytes, dtype=torch.uint8, device=device))
    times = _times(device)
    for _ in range(1 + turns):
        times.add("copy", lambda: torch._foreach_copy_(views, live))
    return times.figure("copy")


def _colocated_table(megabytes: float, copy: Figure, found: dict[Key, list[Sent]]) -> Table:
    rows = []
    for (place, label), sent in found.items():
        figures, on_host = stages(sent), stages(found[HOST, label])[0]
        ratios = [show_ratio(figures[0], other, 2) for other in (on_host, copy)]
        rows.append([place, label, *(figure.cell(1e3, 2) for figure in figures), *ratios])
    note = (
        "Milliseconds, median (min .. max). Weights of trainer and worker lie on one GPU. One plain copy\n"
        f"there: {copy.show(1e3, 2)}."
    )
    head = ["slots in", "encoding", "send()", "encode", "ack", "stall", "of host memory", "of one copy"]
    return Table(f"Colocated, {megabytes:.0f} MB", note, head, rows, names=(0, 1))


_FRACTIONS = (0.0001, 0.01, 0.05, 0.2)
_SYNC_FRACTION = 0.01


@dataclass(frozen=True)
class Plan:
    """The options of one run.

    Attributes:
        megabytes: size of the model, in bfloat16.
        turns: number of turns of each measurement, after one turn that warms up.
        fractions: of elements that change.
        variants: ways to build a patch.
    """

    megabytes: float
    turns: int
    fractions: tuple[float, ...]
    variants: tuple[Variant, ...]


def plan(megabytes: float, quick: bool, compressions: tuple[str, ...]) -> Plan:
    """Return the plan for these options; nvCOMP goes with ``transport_device="cuda"`` only."""
    variants = [
        Variant(snapshot, "cpu" if compression == "none" else "cuda", compression, values)
        for values in ("raw", "relative")
        for compression in compressions
        for snapshot in ("cpu", "cuda")
    ]
    turns, fractions = (2, _FRACTIONS[1:2]) if quick else (9, _FRACTIONS)
    return Plan(megabytes, turns, fractions, tuple(variants))


def add_options(known: Options) -> None:
    known.add("--megabytes", 500.0, "size of the model in bfloat16", quick=20.0)


def facts(options: argparse.Namespace) -> list[str]:
    if not torch.cuda.is_available():
        raise Unable("it needs a CUDA device, and torch sees none here")
    found = torch.cuda.get_device_properties(torch.device("cuda"))
    gpu = f"GPU: {found.name}, {found.total_memory / 1e9:.0f} GB, CUDA {torch.version.cuda}"
    return [*machine(), gpu]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    yield from measure(plan(options.megabytes, options.quick, _compressions()), torch.device("cuda"))


def measure(chosen: Plan, device: torch.device) -> Iterator[Table]:
    """Yield the tables of a run, each as soon as it is measured."""
    old = layered(chosen.megabytes)
    yield dense_table(chosen.megabytes, measure_dense(old, device, chosen.turns))
    for fraction in chosen.fractions:
        say(f"patches: {fraction:.2%} of {chosen.megabytes:g} MB")
        update = by_chance(old, fraction, "1..4 ulp")
        yield build_table(update.name, measure_build(update, chosen.variants, device, chosen.turns))
    say("send() until applied")
    update = by_chance(old, _SYNC_FRACTION, "1..4 ulp")
    note = f"Milliseconds, median (min .. max); {update.name}. Trainer and worker share one GPU."
    yield sent_table(chosen.megabytes, note, _measure_sync(update, device, chosen.turns))
    say("slots on the GPU and in host memory")
    copy = _measure_copy(update, device, chosen.turns)
    yield _colocated_table(chosen.megabytes, copy, _measure_colocated(update, device, chosen.turns))


def _compressions() -> tuple[str, ...]:
    try:
        resolve_compression("nvcomp_ans")
    except ImportError as reason:
        say(f"without nvCOMP: {reason}")
        return ("none",)
    return ("none", "nvcomp_lz4", "nvcomp_ans")
