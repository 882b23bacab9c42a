"""Staging: the versions of one receiver, from their first chunk until they are in force."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from weight_update.encodings import Decoder, decoder_for, read_delta
from weight_update.encodings.dense import copy_tensors
from weight_update.errors import FormatError, LifecycleError, undo_on_error
from weight_update.receiver.engine_copy import DoubleBuffer, EngineCopy
from weight_update.receiver.flat_buffers import FlatBuffer, OwnCopy, new_buffer
from weight_update.receiver.gate import Gate
from weight_update.receiver.targets import EngineTarget, StagedUpdate, Storage, Target, target_for
from weight_update.strategy.binding import Binding
from weight_update.strategy.named_weights import NamedWeights
from weight_update.strategy.strategy import WeightStrategy
from weight_update.transports.base import TransportBackend
from weight_update.wire.frames import WeightChunk, extra_of, payloads_of
from weight_update.wire.memory import await_stream, memory_identity, pin
from weight_update.wire.schema import WeightSchema

_CPU = torch.device("cpu")
_KEPT_FOR = 2  # updates that memory may stay unused: two versions take turns in it


class UpdateObserver(Protocol):
    """An object that is told of each update."""

    def switched(self) -> None:
        """Note that a version becomes visible. Called inside the gate."""

    def applied(self, weights: Callable[[], NamedWeights]) -> None:
        """Note that a version was applied. Called outside the gate, before the sender gets the answer.

        ``weights`` returns the weights of the version.
        """


@dataclass
class ReceiverOptions:
    """Options with which one receiver joins its sender and applies updates."""

    link: TransportBackend
    strategy: WeightStrategy
    gate: Gate
    worker: int
    token: str
    instance: str  # random name that tells the receiver from others that join as `worker`
    stable_addresses: bool  # whether to copy into the model's tensors instead of pointing them at payloads
    timeout: float  # seconds that an update waits for the running forward pass to end
    late_updates_wait: bool  # whether an update then waits on, instead of failing
    observer: UpdateObserver | None  # is told of each update; it may be set at any time


@dataclass
class _Memory:
    """Memory of a receiver that updates arrive in.

    Attributes:
        tensor: 1-D uint8 tensor.
        used: number of the last update that asked for it.
    """

    tensor: torch.Tensor = field(repr=False)
    used: int = 0

    @property
    def place(self) -> tuple[int, torch.device]:
        """Size in bytes and device."""
        return self.tensor.numel(), self.tensor.device


class Staging:
    """The weights of one receiver: those in force, those staged, and chunks that are arriving.

    One thread at a time calls its methods, except for :meth:`weights`.
    """

    def __init__(self, options: ReceiverOptions) -> None:
        self.version: int | None = None  # in force; None before the first, and after an engine failed to load
        self.current: StagedUpdate | None = None  # in force, or the last one that an engine loaded
        self.staged: StagedUpdate | None = None  # waits to be applied
        self.parts: list[WeightChunk] = []  # chunks of the update that is arriving
        self._strategy, self._gate, self._stable = options.strategy, options.gate, options.stable_addresses
        self._link = options.link
        self._schema = WeightSchema((), 0)  # of the last WELCOME
        self._in_payloads = Storage(self._schema)
        self.target = Target()  # what versions are written to
        self._own: OwnCopy | None = None
        self._flat: tuple[Binding, Storage] | None = None  # found once for each binding
        self._decoders: dict[str, Decoder] = {}
        self._memory: list[_Memory] = []
        self._begun = 0  # updates
        self.unguard: Callable[[], None] = lambda: None  # takes the hooks off the model, if it has any
        self._guarded_outside = False

    # -- the target --------------------------------------------------------------------------------

    def bind(self, model: Any, timeout: float) -> None:
        """Keep ``model`` current from now on, beginning with the version that is in force.

        If there is one, wait up to ``timeout`` seconds for running forward passes to end. The model before
        keeps the version that it has. After an error, the model before is kept current.

        Raises:
            LifecycleError: the receiver has weights, and the model before or this one is an engine.
            UnsupportedSourceError, SchemaMismatchError: the model cannot take the weights.
        """
        target = target_for(model, self._strategy, self._stable)
        if self.current is not None and (target.takes_over or self.target.takes_over):
            raise LifecycleError(
                "the engine of a connected receiver cannot be replaced; create a receiver for the new engine"
            )
        guarded = isinstance(model, torch.nn.Module) and not self._guarded_outside
        unguard = self._gate.guard(model) if guarded else lambda: None
        with undo_on_error(unguard):
            if self.current is not None:
                if target.binding is not None:
                    schema = self.current.storage.schema
                    schema.require_same(target.binding.schema(), "the new model", more=True)
                self._gate.run(functools.partial(self._fill, target, self.current), timeout)
        self.unguard()
        self.target, self.unguard = target, unguard

    def _fill(self, target: Target, current: StagedUpdate) -> None:
        """Give a new target the weights and the extra state in force."""
        schema = current.storage.schema
        if self._own is not None:
            self._own.take_back()  # a patch that waits, which the new model gets as whole tensors
        own = self._own if current.storage is self._own else None
        values = target.prepare(schema, current.values if own is None else list(own.values))
        target.check_extra(current.extra)
        bound = self.target
        with undo_on_error(target.exchange_extra(copy.deepcopy(current.extra))):
            if self._own is not None:
                self._own.unbind()  # before the model moves, which is no write of the worker
            try:
                self.target.leave()
                target.write(schema.names, values, current.version)
                current.values, bound = values, target
            finally:
                if self._own is not None:
                    self._own.bind(bound.binding)

    def guard_outside(self) -> None:
        """Take the hooks off the model: the caller holds the gate around every forward pass itself."""
        self._guarded_outside = True
        self.unguard()

    def weights(self) -> NamedWeights:
        """Return the weights in force: live tensors of the model, or copies where there is no model.

        They are empty where an engine has them.
        """
        live = self.target.read()
        if live is not None:
            return live
        section = self._gate.enter(sys._getframe())
        try:
            if self.current is None:
                return NamedWeights({})
            names, copies = self.current.storage.schema.names, _copies(self.current.values)
            return NamedWeights(dict(zip(names, copies, strict=True)), dict(self.current.extra))
        finally:
            self._gate.leave(section)

    # -- arriving updates --------------------------------------------------------------------------

    def begin_with(self, welcome: Mapping[str, Any]) -> None:
        """Get ready for the weights that the header of a WELCOME describes.

        Raises:
            FormatError: the header is not valid.
            SchemaMismatchError: the receiver should start with the sender's weights, and has others.
        """
        self._schema = WeightSchema.from_header(welcome["schema"])
        self._in_payloads = Storage(self._schema)
        self.forget()
        self._own = self._flat = None
        if welcome["keep"]:
            engine_copy = DoubleBuffer if self.target.keeps_tensors else EngineCopy
            kind = engine_copy if self.target.takes_over else OwnCopy
            self._own = kind(self._schema, self.target.binding, self._owns)
            if welcome["digests"] is not None:
                named = self.target.read() or NamedWeights({})
                self._own.adopt(welcome["version"], named.tensors, welcome["digests"])

    def take(self, chunk: WeightChunk) -> StagedUpdate | None:
        """Take the next chunk of an update; return the update, which is staged, after the last chunk.

        An engine that loads in chunks has the update in force by then, and :attr:`staged` stays empty.

        Raises:
            FormatError: the chunk does not follow the one before, or does not fit the schema.
            MissingBaseError: the update changes weights that this receiver does not have.
        """
        header = chunk.header
        if header["schema"] != self._schema.digest:
            raise FormatError("the update is for another schema")
        self._begun += header["index"] == 0
        if header["index"] != len(self.parts):
            raise FormatError(f"got chunk {header['index']}, expected chunk {len(self.parts)}")
        engine = self.target if self._own is None else None
        if isinstance(engine, EngineTarget) and engine.loads_in_chunks(header, self._decoder):
            return self._load_chunk(engine, chunk)
        self.parts.append(self._fed(chunk) if header["base"] is None else chunk)
        if len(self.parts) < header["count"]:
            return None
        parts, self.parts = self.parts, []
        self._follow()
        update = self._whole(parts) if header["base"] is None else self._change(parts)
        self.target.check_extra(update.extra)
        update.storage.stage(update, self.target)
        self.staged = update
        return update

    def _fed(self, chunk: WeightChunk) -> WeightChunk:
        """Return a chunk whose payload was read on arrival; a flat one is read only to bring it to a GPU."""
        header, payload = chunk.header, chunk.payload
        if payload is None:
            return chunk
        decoder, device = self._decoder(header["encoding"]), self.target.device_for(payload)
        source = self._link.pinned(payload) if device.type == "cuda" else payload
        if not decoder.is_flat:
            fed = decoder.feed(header["index"], source, functools.partial(self.allocate, device=device))
        elif payload.is_cpu and device.type == "cuda":
            fed = self.allocate(payload.numel(), device)
            fed.copy_(source)
            await_stream(fed)
        else:
            fed = source
        if fed is source:
            return chunk
        self._link.release(payload)
        return replace(chunk, payload=fed)

    def forget(self, version: int | None = None) -> bool:
        """Drop everything that arrived and is not in force; if ``version`` is given, only its parts.

        Returns:
            True if an engine had loaded a part of it, and so has no whole version any more.
        """
        if version is None:
            self._decoders.clear()  # they hold views into payloads
        if version is None or (self.staged is not None and self.staged.version == version):
            self.staged = None
            if self._own is not None:
                self._own.take_back()
        if version is None or (self.parts and self.parts[0].header["version"] == version):
            self.parts = []
            return self._abort_loading()
        return False

    def allocate(self, nbytes: int, device: torch.device = _CPU) -> torch.Tensor:
        """Return memory in which no weights lie that are in force, staged or partly received."""
        taken = {id(part.payload) for part in self.parts}
        for update in (self.current, self.staged):
            if update is not None:
                taken.update(id(payload) for payload in update.payloads)
        wanted = nbytes, device
        free = (one for one in self._memory if one.place == wanted and id(one.tensor) not in taken)
        if (memory := next(free, None)) is not None:
            pin(memory.tensor)  # not before: memory of some sizes is used only once
        else:
            memory = self._new_memory(nbytes, device, taken)
        memory.used = self._begun
        return memory.tensor

    def _new_memory(self, nbytes: int, device: torch.device, taken: Container[int]) -> _Memory:
        """Return new memory; drop what was idle for some updates, or all that is idle if memory is short."""
        recent = self._begun - _KEPT_FOR
        self._memory = [one for one in self._memory if id(one.tensor) in taken or one.used >= recent]
        try:
            memory = _Memory(new_buffer(nbytes, device))
        except (RuntimeError, MemoryError):
            self._memory = [one for one in self._memory if id(one.tensor) in taken]
            memory = _Memory(new_buffer(nbytes, device))
        self._memory.append(memory)
        return memory

    def _owns(self, payload: torch.Tensor) -> bool:
        """Return whether ``payload`` is memory of this receiver, not of the sender."""
        return any(payload is memory.tensor for memory in self._memory)

    def _decoder(self, encoding: str) -> Decoder:
        if encoding not in self._decoders:
            self._decoders[encoding] = decoder_for(encoding, self._schema)
        return self._decoders[encoding]

    def _follow(self) -> None:
        """Find the model's tensors again if a part of it was replaced."""
        if self.target.follow(self._schema) and self._own is not None:
            self._own.bind(self.target.binding)
            self._own.forget()  # the new part has weights of its own

    def _whole(self, parts: list[WeightChunk]) -> StagedUpdate:
        """Return the update of all weights that ``parts`` are."""
        header, payloads = parts[0].header, payloads_of(parts)
        decoder = self._decoder(header["encoding"])
        values = decoder.decode(payloads)
        if values and values[0].is_cuda:
            await_stream(values[0])  # other threads read on other streams
        storage = self._storage(is_flat=decoder.is_flat and payloads[0].is_cpu)
        return StagedUpdate(header["version"], header["group"], payloads, values, extra_of(parts), storage)

    def _storage(self, *, is_flat: bool) -> Storage:
        """Return the memory that all weights are to lie in; ``is_flat`` if they arrived as a flat buffer."""
        binding = self.target.binding
        if self._own is not None or not is_flat or binding is None or not self.target.points:
            return self._own or self._in_payloads
        if self._flat is None or self._flat[0] is not binding:
            suits = FlatBuffer.suits(self._schema, binding)
            self._flat = binding, FlatBuffer(self._schema, binding) if suits else self._in_payloads
        return self._flat[1]

    def _change(self, parts: list[WeightChunk]) -> StagedUpdate:
        """Return the update that changes weights in force."""
        header, payloads = parts[0].header, payloads_of(parts)
        if self._own is None:
            raise FormatError("got a delta, but this receiver keeps no weights to apply it to")
        device = self._own.device
        sources = map(self._link.pinned, payloads) if device.type == "cuda" else payloads
        deltas = [read_delta(header["encoding"], source, self._schema, device) for source in sources]
        chain = [header["base"], *(delta.version for delta in deltas)]
        if chain[:-1] != [delta.base for delta in deltas] or chain[-1] != header["version"]:
            raise FormatError(f"the deltas do not lead from version {header['base']} to {header['version']}")
        version, group, base = header["version"], header["group"], header["base"]
        kept, values = [] if self.current is None else self.current.payloads, self._own.values
        if values:
            await_stream(values[0])  # other threads apply the deltas on other streams
        extra = extra_of(parts)
        return StagedUpdate(version, group, kept, values, extra, self._own, base, deltas, used_up=payloads)

    # -- inside the gate ---------------------------------------------------------------------------

    def begin(self, update: StagedUpdate) -> None:
        """Do the first half of applying an update, which may fail and can be reverted."""
        storage = update.storage
        self._follow()
        storage.begin(update, self.target)
        if update.storage is not storage:  # the model does not suit its flat buffer any more
            self._flat = None
        update.undo = self.target.exchange_extra(update.extra)

    def switch(self, update: StagedUpdate) -> None:
        """Do the second half: the update is in force from now on."""
        try:
            update.storage.switch(update, self.target)
        except BaseException:
            self._abort_loading()
            raise
        before = [] if self.current is None else self.current.payloads
        kept = set(map(id, update.payloads))
        update.used_up = update.used_up + [one for one in before if id(one) not in kept]
        self.current, self.version = update, update.version

    # -- engines -----------------------------------------------------------------------------------

    def _load_chunk(self, engine: EngineTarget, chunk: WeightChunk) -> StagedUpdate | None:
        """Have an engine load a chunk that just arrived; return the update after the last chunk."""
        header = chunk.header
        engine.load_chunk(chunk, self._decoder(header["encoding"]), self._schema)
        if chunk.payload is not None:
            self._link.release(chunk.payload)
        self.parts.append(replace(chunk, payload=None))
        if len(self.parts) < header["count"]:
            return None
        loaded, self.parts = engine.finish(), []
        version, storage = header["version"], self._in_payloads
        self.current = StagedUpdate(
            version, None, [], [], {}, storage, arrived=loaded.since, stall=loaded.seconds
        )
        self.version = version
        return self.current

    def _abort_loading(self) -> bool:
        """Abort the version that an engine has begun to load, if any; the engine then has none."""
        if self.target.loading is None:
            return False
        self.version = None
        if self._own is not None:
            self._own.forget()
        self.target.abort()
        return True

    # -- leaving -----------------------------------------------------------------------------------

    @property
    def lies_in_payloads(self) -> bool:
        """Whether the version in force lies in memory of the sender."""
        return self.current is not None and not all(map(self._owns, self.current.payloads))

    def leave_payloads(self) -> None:
        """Copy the version in force out of the sender's memory; nobody may compute with it meanwhile."""
        assert self.current is not None
        self.current.values = _copies(self.current.values)
        self.target.move(self.current.storage.schema.names, self.current.values)
        self.current.payloads = []

    def close(self) -> None:
        """Free all memory; the model keeps the version it has."""
        self.unguard()
        self.current = self.staged = None
        self.parts, self._memory = [], []
        self._decoders.clear()


@torch.inference_mode(False)  # the model may be trained later
def _copies(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return clones that are complete; tied tensors stay tied."""
    twins = {memory_identity(value) or id(value): value for value in values}
    clones = {key: torch.empty_like(value) for key, value in twins.items()}
    copy_tensors(list(clones.values()), list(twins.values()), "copying weights", serial=True)
    for clone in clones.values():
        await_stream(clone)
    return [clones[memory_identity(value) or id(value)] for value in values]
