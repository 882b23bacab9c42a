"""The patch encoding: positions and values of the elements that changed since the last version.

Behaviour and options follow RLinf's patch syncer; ``docs/patch_format.rst`` describes the payload byte by
byte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from weight_update.arguments import require_bool
from weight_update.compression import Compression, resolve_compression
from weight_update.encodings.base import (
    CPU,
    Delta,
    DeltaEncoding,
    Encoding,
    Lend,
    Tracker,
    WholeEncoding,
    register_encoding,
)
from weight_update.encodings.bucket import BucketEncoding, require_size
from weight_update.encodings.dense import copy_tensors
from weight_update.encodings.patch.changes import ByteRange, Changes
from weight_update.encodings.patch.diff_cpu import Scan, Scanner
from weight_update.encodings.patch.diff_cuda import CudaScanner, Queues
from weight_update.encodings.patch.encode_cuda import add_on_device
from weight_update.encodings.patch.format import PatchOptions, add_on_cpu, decode_patch, encode_patch
from weight_update.threads import call_in_thread
from weight_update.wire.memory import await_stream
from weight_update.wire.schema import WeightSchema, matching

_NOTHING = torch.empty(0, device="cpu")
_FEW = 100_000
"""Changes below which the snapshot is written at once: starting a thread would take longer."""

Device = Literal["cpu", "cuda"]
Layout = Literal["flat", "coo"]
Values = Literal["raw", "relative"]


@register_encoding
@dataclass(frozen=True)
class PatchEncoding(DeltaEncoding):
    """Encoding that sends positions and values of changed elements; receivers that join get all weights.

    Weights are compared as bits, in the receivers' dtypes, with a snapshot of the last version. If more than
    90 % of the elements changed, or the patch would be larger than 90 % of the weights, the update carries
    all weights in buckets, and its report states this.

    Args:
        snapshot_device: device of the snapshot: ``"cpu"`` (pinned if weights are on a GPU) or ``"cuda"``. The
            snapshot has the size of the model in the receivers' dtypes.
        transport_device: device that compresses a patch: ``"cpu"``, or ``"cuda"`` for the GPU of the weights.
            Without compression both are the same, also on a machine without a GPU: a patch is built where
            the weights are, and sent from CPU memory.
        delta_encoding: whether to send distances between positions instead of positions.
        compression: compression of the patch: ``"none"``, ``"ans"`` (usually fewest bytes), ``"lz4"``,
            ``"zstd"``, ``"nvcomp_ans"``, ``"nvcomp_lz4"`` (both on the GPU) or a
            :class:`~weight_update.Compression`. Data that would not shrink is sent as it is.
        init_sync: whether to send receivers their initial weights. If False, they must have the weights
            already: digests are compared, and a difference is an error.
        init_sync_prefixes: prefixes of the initial weights to send (``"head"`` means ``head`` and
            ``head.*``); all others are checked as with ``init_sync=False``. None for all.
        init_sync_bucket_size: largest number of bytes in a bucket of a full update.
        layout: ``"flat"`` for one stream of positions in the flat buffer; ``"coo"`` for rows and columns of
            each tensor, as RLinf documents it.
        values: ``"raw"``; or ``"relative"``, the distance from the old value, which takes fewer bytes and
            compresses well, but takes a little longer. None for relative if compressed, else raw.

    Raises:
        ValueError: an option has a value that is not allowed; the message lists the allowed values.
    """

    name: ClassVar[str] = "patch/1"
    snapshot_device: Device = "cpu"
    transport_device: Device = "cpu"
    delta_encoding: bool = True
    compression: str | Compression = "none"
    init_sync: bool = True
    init_sync_prefixes: Sequence[str] | None = None
    init_sync_bucket_size: int = 128 << 20
    layout: Layout = "flat"
    values: Values | None = None

    def __post_init__(self) -> None:
        allowed = {"snapshot_device": Device, "transport_device": Device, "layout": Layout, "values": Values}
        for option, known in allowed.items():
            value = self.__dict__[option]
            if value not in get_args(known) and (option, value) != ("values", None):
                raise ValueError(f"unknown {option} {value!r} (known: {', '.join(get_args(known))})")
        require_bool("delta_encoding", self.delta_encoding)
        require_bool("init_sync", self.init_sync)
        require_size("init_sync_bucket_size", self.init_sync_bucket_size)
        if isinstance(self.init_sync_prefixes, str):
            raise ValueError(f"init_sync_prefixes is a list of prefixes, not {self.init_sync_prefixes!r}")
        chosen = resolve_compression(self.compression)
        if chosen.device not in ("any", self.transport_device):
            where = "GPU" if chosen.device == "cuda" else "CPU"
            raise ValueError(
                f"compression={chosen.label!r} works on the {where}: set transport_device={chosen.device!r}"
            )
        object.__setattr__(self, "compression", chosen)
        if self.values is None:
            object.__setattr__(self, "values", "raw" if chosen.label == "none" else "relative")

    @property
    def compressed_with(self) -> str:
        label = resolve_compression(self.compression).label
        return "" if label == "none" else label

    @property
    def whole(self) -> WholeEncoding:
        return BucketEncoding(bucket_size=self.init_sync_bucket_size)

    @property
    def options(self) -> PatchOptions:
        """The options of the format."""
        relative, compression = self.values == "relative", resolve_compression(self.compression)
        return PatchOptions(self.layout, self.delta_encoding, relative, compression)

    def bootstraps(self, schema: WeightSchema) -> list[int]:
        if not self.init_sync:
            return []
        if self.init_sync_prefixes is None:
            return list(range(len(schema.tensors)))
        names = matching(self.init_sync_prefixes, schema.names)
        chosen = {i for i, name in enumerate(schema.names) if name in names}
        owners = chosen | {first for first, other in schema.ties if other in chosen}
        return sorted(owners | {other for first, other in schema.ties if first in owners})

    def tracker(self, schema: WeightSchema, tracked: Sequence[int] | None) -> Tracker[Scan]:
        return PatchTracker(self, schema, tracked)

    @classmethod
    def read(cls, payload: torch.Tensor, schema: WeightSchema) -> Delta:
        return decode_patch(payload, schema)

    @classmethod
    def read_for(cls, payload: torch.Tensor, schema: WeightSchema, device: torch.device) -> Delta:
        return decode_patch(payload, schema, device)


def sends_all_at_first(encoding: Encoding) -> bool:
    """Return whether receivers get all of their initial weights by ``encoding``."""
    if not isinstance(encoding, PatchEncoding):
        return True
    return encoding.init_sync and encoding.init_sync_prefixes is None


class PatchTracker(Tracker[Scan]):
    """A snapshot in one flat buffer, and the scanner that compares weights with it.

    A large snapshot is advanced in the background; methods that need the snapshot wait for that.
    """

    def __init__(self, options: PatchEncoding, schema: WeightSchema, tracked: Sequence[int] | None) -> None:
        if not torch.cuda.is_available():
            if options.snapshot_device == "cuda":
                raise ValueError("snapshot_device='cuda' needs a CUDA device; use 'cpu' here")
            compression = resolve_compression(options.compression)
            if compression.device == "cuda":
                raise ValueError(
                    f"compression={compression.label!r} works on a GPU, and there is no CUDA device here; "
                    "choose another, such as compression='ans', with transport_device='cpu'"
                )
        self._options, self._schema, self._tracked = options, schema, tracked
        self._flat = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._scanner: Scanner | CudaScanner | None = None
        self._queues: Queues | None = None
        self._flush: Future[None] | None = None

    @torch.no_grad()
    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if self._options.snapshot_device == "cuda" and gpu is None:
            raise ValueError("snapshot_device='cuda' needs weights on a GPU; use 'cpu' here")
        self._start(gpu)
        views, own = self._schema.views(self._flat), self._schema.distinct
        copy_tensors([views[i] for i in own], [tensors[i] for i in own], "encoding weights")
        await_stream(self._flat)  # another stream may read it next

    def _start(self, gpu: torch.device | None) -> None:
        """Allocate the snapshot, and create the scanner for weights on ``gpu``, or on none."""
        kept, relative = self._options.snapshot_device, self._options.values == "relative"
        device = gpu if kept == "cuda" else CPU
        pinned = gpu is not None and device is CPU
        self._flat = torch.zeros(self._schema.nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        if gpu is not None:
            self._queues = Queues(gpu)
            self._scanner = CudaScanner(
                self._schema,
                self._queues,
                self._tracked,
                relative=relative,
                snapshot_device=kept,
            )
        else:
            self._scanner = Scanner(self._schema, self._tracked, relative=relative)

    def compare(self, tensors: Sequence[torch.Tensor | None]) -> Scan:
        assert self._scanner is not None
        self._flushed()
        return self._scanner.scan([_NOTHING if one is None else one for one in tensors], self._flat)

    def encode(self, difference: Scan, base: int, version: int, lend: Lend) -> torch.Tensor:
        add, device = (add_on_cpu, CPU) if self._queues is None else (add_on_device, self._queues.device)
        changes, options = difference.changes, self._options.options
        return encode_patch(changes, self._schema, base, version, options, lend, add, device)

    def bootstrap(self, version: int, lend: Lend) -> torch.Tensor:
        self._flushed()
        chosen = set(self._options.bootstraps(self._schema))
        metas = [self._schema.tensors[i] for i in self._schema.distinct if i in chosen]
        ranges = [ByteRange(m.offset, self._flat[m.offset : m.offset + m.nbytes]) for m in metas if m.nbytes]
        ranges.sort(key=lambda one: one.start)
        changes = Changes(ranges=tuple(ranges)).to(CPU)
        device, options = CPU if self._queues is None else self._queues.device, self._options.options
        return encode_patch(changes, self._schema, version, version, options, lend, device=device)

    def advance(self, difference: Scan) -> None:
        self._flushed()
        if difference.changed >= _FEW:
            with contextlib.suppress(RuntimeError):  # the system starts no more threads
                write, changes = self._write, difference.changes
                self._flush = call_in_thread("weight_update-snapshot", write, changes, in_order=True)
                return
        self._write(difference.changes)

    def _write(self, changes: Changes) -> None:
        if self._queues is not None and self._flat.is_cpu:
            changes = changes.map(self._queues.bring)
        changes.write(self._flat)
        await_stream(self._flat)

    def _flushed(self) -> None:
        """Wait for the end of the last :meth:`advance`; raise its error once."""
        flush = self._flush
        if flush is not None:
            if flush.exception() is not None:
                self._flush = None
            flush.result()

    def weights(self) -> list[torch.Tensor]:
        self._flushed()
        return self._schema.views(self._flat)

    def copy(self) -> PatchTracker:
        self._flushed()
        other = PatchTracker(self._options, self._schema, self._tracked)
        other._start(None if self._queues is None else self._queues.device)
        other._flat.copy_(self._flat)
        await_stream(other._flat)
        return other
