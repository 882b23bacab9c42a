"""Dense and patches of weights on a GPU, stage by stage, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from benchmarks.patch_bytes import obvious
from benchmarks.report import Figure, Table, ratio
from benchmarks.updates import Update
from weight_update import PatchEncoding
from weight_update.encodings import DenseEncoding, Difference
from weight_update.encodings.patch.format import decode_patch
from weight_update.transports.shared_memory.slots import SharedBuffer
from weight_update.wire.schema import WeightSchema

__all__ = ["Times", "Variant", "build_table", "dense_table", "measure_build", "measure_dense"]

Device = Literal["cpu", "cuda"]


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


@dataclass
class Times:
    """The seconds of each action, by turn; each begins and ends with an idle device.

    Attributes:
        device: device of the weights.
        seconds: times by action; the first turn warms up.
        nbytes: sizes of the results.
    """

    device: torch.device
    seconds: dict[Any, list[float]] = field(default_factory=dict)
    nbytes: dict[Any, int] = field(default_factory=dict)

    def add(self, what: Any, action: Callable[[], Any]) -> Any:
        """Run ``action`` and note its seconds."""
        self._idle()
        start = time.perf_counter()
        result = action()
        self._idle()
        self.seconds.setdefault(what, []).append(time.perf_counter() - start)
        return result

    def figure(self, *stages: Any) -> Figure:
        """Return the time of the stages together, in all turns but the first."""
        return Figure(tuple(map(sum, zip(*(self.seconds[stage][1:] for stage in stages), strict=True))))

    def _idle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Memory:
    """A flat buffer on the device, and buffers to copy from and to."""

    def __init__(self, weights: dict[str, torch.Tensor], device: torch.device) -> None:
        self.schema = WeightSchema.of(weights)
        self.live = [tensor.to(device) for tensor in weights.values()]
        self.there = torch.zeros(self.schema.nbytes, dtype=torch.uint8, device=device)
        self.pinned = torch.zeros(self.schema.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        torch._foreach_copy_(self.schema.views(self.there), self.live)
        self.slot = SharedBuffer(self.schema.nbytes)


def measure_dense(weights: dict[str, torch.Tensor], device: torch.device, turns: int) -> Times:
    """Time the copies of a dense update on each side, beside plain copies of the same bytes."""
    memory, times = _Memory(weights, device), Times(device)
    times.nbytes["model"] = memory.schema.nbytes
    encoder = DenseEncoding().encoder(memory.schema)
    slot, there, pinned = memory.slot.tensor, memory.there, memory.pinned
    pinned_views, slot_views = memory.schema.views(pinned), memory.schema.views(slot)
    own_views = memory.schema.views(there)
    for _ in range(1 + turns):
        times.add("dense: encode into a shared slot", lambda: encoder.encode(memory.live, lambda _: slot))
        times.add(
            "plain: tensors to pinned memory",
            lambda: torch._foreach_copy_(pinned_views, memory.live, non_blocking=True),
        )
        times.add("plain: one buffer to pinned memory", lambda: pinned.copy_(there, non_blocking=True))
        times.add("plain: one buffer to a shared slot", lambda: slot.copy_(there))
        times.add("dense: apply from a shared slot", lambda: torch._foreach_copy_(own_views, slot_views))
        times.add("plain: one buffer from pinned memory", lambda: there.copy_(pinned, non_blocking=True))
    memory.slot.close()
    return times


def dense_table(megabytes: float, times: Times) -> Table:
    """Return a table of copies; ratios are to the copy of one buffer to or from pinned memory."""
    rows = []
    for what in times.seconds:
        figure = times.figure(what)
        plain = times.figure(f"plain: one buffer {'from' if ' from ' in what else 'to'} pinned memory")
        speed = times.nbytes["model"] / (figure.median or 1.0) / 1e9
        rows.append([what, figure.show(1e3, 2), f"{speed:.1f}", f"{ratio(figure, plain) or 0.0:.2f}"])
    note = "Milliseconds, median (min .. max). Weights on the GPU; shared slots are not pinned."
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
        decode_patch(payload, self._schema).changes.to(receiver.device).write(receiver)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """Return the same shared slot in every turn, as an update over shared memory does."""
        if self._slot is None:
            self._slot = SharedBuffer(nbytes + nbytes // 8)
        return self._slot.tensor[:nbytes]

    def close(self) -> None:
        if self._slot is not None:
            self._slot.close()


def measure_build(update: Update, variants: Iterable[Variant], device: torch.device, turns: int) -> Times:
    """Time every variant, and the obvious way, in turns.

    Raises:
        RuntimeError: a patch did not lead to the new weights.
    """
    times, schema = Times(device), update.schema
    old, new = ([tensor.to(device) for tensor in side.values()] for side in (update.old, update.new))
    before, expected = (_Memory(side, device).there for side in (update.old, update.new))
    receiver, pinned = before.clone(), torch.zeros_like(before, device="cpu")
    pinned = pinned.pin_memory() if device.type == "cuda" else pinned
    builds = {variant: _Build(variant, schema, old) for variant in variants}
    for _ in range(1 + turns):
        times.add("copy", lambda: pinned.copy_(expected, non_blocking=True))
        times.add("obvious", lambda: obvious(old, new))
        for variant, build in builds.items():
            receiver.copy_(before)
            build.turn(times, new, receiver)
            if not torch.equal(receiver, expected):
                raise RuntimeError(f"{update.name}: the patch of {variant} did not lead to the new weights")
    for build in builds.values():
        build.close()
    return times


def build_table(update: str, times: Times) -> Table:
    """Return a table with one row for each variant."""
    copy, plain = times.figure("copy"), times.figure("obvious")
    rows = []
    for what, figure in (("one copy to pinned memory", copy), ("the obvious way", plain)):
        rows.append([what, *["-"] * 5, figure.show(1e3, 2), *["-"] * 3])
    for variant in (key for key in times.nbytes if isinstance(key, Variant)):
        build = times.figure(("scan", variant), ("encode", variant))
        apply = times.figure(("apply", variant))
        rows.append(
            [
                *map(str, vars(variant).values()),
                f"{times.nbytes[variant] / max(times.nbytes['changed'], 1):.2f}",
                times.figure(("scan", variant)).show(1e3, 2),
                build.show(1e3, 2),
                apply.show(1e3, 2),
                f"{ratio(build, copy) or 0.0:.2f}",
                f"{ratio(plain, build) or 0.0:.2f}",
            ]
        )
    note = (
        "Milliseconds, median (min .. max). B: bytes for each changed element. Build is scan and encode,\n"
        "into a shared slot; apply is decode and write, into weights on the GPU. The obvious way finds\n"
        "positions and values with (a != b).nonzero() and leaves them on the GPU."
    )
    head = ["snapshot", "transport", "compression", "values", "B", "scan", "build", "apply"]
    return Table(f"Patches: {update}", note, [*head, "build/copy", "obvious/build"], rows)
