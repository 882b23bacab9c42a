"""What versions enter on one receiver: a model, an inference engine, or nothing but memory."""

from __future__ import annotations

import functools
import operator
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weight_update.encodings import Decoder, Delta, decoder_for, read_delta
from weight_update.engines.adapter import EngineBinding, Loading
from weight_update.engines.base import InferenceEngine
from weight_update.errors import FormatError, LifecycleError
from weight_update.receiver.arena import Arena
from weight_update.receiver.flat_buffers import OwnWeights
from weight_update.receiver.gate import Gate
from weight_update.strategy.binding import Binding
from weight_update.strategy.named_weights import NamedWeights
from weight_update.strategy.strategy import WeightStrategy
from weight_update.wire.frames import WeightChunk
from weight_update.wire.memory import await_stream, memory_identity
from weight_update.wire.schema import WeightSchema
from weight_update.wire.updates import extra_of, payloads_of

__all__ = ["Destination", "Staged"]

_CPU = torch.device("cpu")


@dataclass
class Staged:
    """An update that arrived whole and was checked; the one in force stays in this form.

    Attributes:
        payloads: memory that the values lie in.
        values: one for each schema entry; none where an engine has them.
        undo: takes back what :meth:`Destination.begin` did.
        base: the version that ``deltas`` change; None for whole weights.
        used_up: payloads that are free once it is applied.
        flat: the payload, where it is the flat buffer of the schema and goes into the arena.
        arena: where to.
        lies_there: whether the model has its tensors in the arena.
        seconds: for how long it kept forward passes out, where an engine took it chunk by chunk.
    """

    version: int
    group: str | None
    payloads: list[torch.Tensor]
    values: list[torch.Tensor]
    extra: dict[str, Any]
    arrived: float = field(default_factory=time.perf_counter)
    undo: Callable[[], None] = lambda: None
    base: int | None = None
    deltas: list[Delta] = field(default_factory=list)
    used_up: list[torch.Tensor] = field(default_factory=list)
    flat: torch.Tensor | None = None
    arena: Arena | None = None
    lies_there: bool = False
    seconds: float = 0.0


class Destination:
    """Holds one model and the weights that arrived for it: in part, whole, and in force.

    One thread at a time calls it, except for :meth:`weights`.

    Args:
        strategy: how weights enter the model.
        gate: when they may.
        stable_addresses: copy into the model's tensors instead of pointing them at received memory.
        release: gives memory of payloads back to the link.

    Attributes:
        version: the one in force; None before the first, and after an engine failed to load one.
        current: what is known of the version in force, or of the last one that an engine had.
        staged: the one that waits to be applied.
        parts: chunks of the one that is arriving.
    """

    def __init__(
        self,
        strategy: WeightStrategy,
        gate: Gate,
        *,
        stable_addresses: bool,
        release: Callable[[torch.Tensor], None],
    ) -> None:
        self.version: int | None = None
        self.current: Staged | None = None
        self.staged: Staged | None = None
        self.parts: list[WeightChunk] = []
        self._strategy, self._gate, self._stable, self._release = strategy, gate, stable_addresses, release
        self._schema: WeightSchema | None = None
        self._binding: Binding | EngineBinding | None = None
        self._store: OwnWeights | None = None
        self._home: tuple[Binding, Arena | None] | None = None  # of a model, once it was asked for
        self._loading: Loading | None = None  # what an engine has begun and not finished
        self._decoders: dict[str, Decoder] = {}
        self._memory: list[torch.Tensor] = []
        self._unguard: Callable[[], None] | None = None
        self._guarded_outside = False

    # -- the model ---------------------------------------------------------------------------------

    def bind(self, model: Any, timeout: float) -> None:
        """Keep ``model`` current from now on, beginning with the version that is in force.

        Args:
            model: module, TensorDict, dict or :class:`~weight_update.InferenceEngine`; None only keeps the
                weights.
            timeout: seconds to wait for running forward passes to end.

        Raises:
            LifecycleError: an engine is involved, beside which no weights are kept.
            UnsupportedSourceError, SchemaMismatchError: it cannot take the weights.
        """
        engines = isinstance(model, InferenceEngine) or isinstance(self._binding, EngineBinding)
        if self.current is not None and engines:
            raise LifecycleError(
                "an engine cannot be exchanged while connected; make a receiver of the new one"
            )
        self.unguard()
        if isinstance(model, InferenceEngine):
            self._binding = EngineBinding(model)
        else:
            self._binding = None if model is None else self._strategy.bind(model)
        if isinstance(model, torch.nn.Module) and not self._guarded_outside:
            self._unguard = self._gate.guard(model)
        if self.current is not None and self._bound is not None and self._schema is not None:
            self._schema.require_same(self._bound.schema(), "the new model", more=True)
            self._gate.run(self._fill_new_model, timeout)

    def _fill_new_model(self) -> None:
        assert self.current is not None
        if self._store is not None:
            self.current.values = list(self._store.values)
        self._write(self._prepared(self.current))
        if self._store is not None:
            self._store.bind(self._bound)

    @property
    def _bound(self) -> Binding | None:
        """The model, if its tensors can be kept in memory of ours."""
        return self._binding if isinstance(self._binding, Binding) else None

    @property
    def fails_late(self) -> bool:
        """Whether :meth:`switch` calls an engine, which may refuse even then."""
        return self._bound is None

    def guard_outside(self) -> None:
        """The caller holds the gate around every forward pass itself; drop the hooks of the model."""
        self._guarded_outside = True
        self.unguard()

    def unguard(self) -> None:
        """Take the hooks off the model."""
        if self._unguard is not None:
            self._unguard()
            self._unguard = None

    def wanted(self) -> WeightSchema | None:
        """The schema of the model as it is now; None without one.

        Raises:
            UnsupportedSourceError: it has weights that cannot be synchronized.
        """
        return None if self._binding is None else self._binding.schema()

    def weights(self) -> NamedWeights:
        """The weights in force: live tensors of the model, or copies where there is no model.

        None of an engine.
        """
        if self._binding is not None:
            return self._binding.read()
        stay = self._gate.enter(sys._getframe())
        try:
            if self.current is None or self._schema is None:
                return NamedWeights({})
            copies = _copies(self.current.values)
            return NamedWeights(dict(zip(self._schema.names, copies, strict=True)), dict(self.current.extra))
        finally:
            self._gate.leave(stay)

    # -- what arrives ------------------------------------------------------------------------------

    def begin_with(self, welcome: Mapping[str, Any]) -> None:
        """Take weights as the header of a WELCOME says they will be.

        Raises:
            FormatError: it says nothing of use.
            SchemaMismatchError: weights are to be here already, and are not those of the sender.
        """
        self._schema = WeightSchema.from_header(welcome["schema"])
        self.forget()
        self._decoders.clear()
        self._store = self._home = None
        if welcome["keep"]:
            self._store = OwnWeights(self._schema, self._bound)
            if welcome["digests"] is not None:
                named = NamedWeights({}) if self._binding is None else self._binding.read()
                self._store.adopt(welcome["version"], named.tensors, welcome["digests"])

    def take(self, chunk: WeightChunk) -> Staged | None:
        """Take the next chunk of an update; when it is the last, what is now staged.

        An engine that takes weights as they come has them in force by then, and :attr:`staged` stays empty.

        Raises:
            FormatError: it does not follow what came before, or does not fit.
            Behind: it changes weights that are not here.
        """
        header = chunk.header
        if self._schema is None or header["schema"] != self._schema.digest:
            raise FormatError("an update for another schema")
        if header["index"] != len(self.parts):
            raise FormatError(f"chunk {header['index']} came, {len(self.parts)} was next")
        engine = self._binding if isinstance(self._binding, EngineBinding) and self._store is None else None
        if engine is not None and engine.hands_on(header, self._decoder):
            return self._hand_on(engine, chunk, self._schema)
        if header["base"] is None and chunk.payload is not None:
            allocate = functools.partial(self.allocate, device=self._landing(chunk.payload))
            fed = self._decoder(header["encoding"]).feed(header["index"], chunk.payload, allocate)
            if fed is not chunk.payload:
                self._release(chunk.payload)
                chunk = replace(chunk, payload=fed)
        self.parts.append(chunk)
        if len(self.parts) < header["count"]:
            return None
        parts, self.parts = self.parts, []
        self.staged = self._stage_delta(parts) if header["base"] is not None else self._stage(parts)
        return self.staged

    def forget(self, version: int | None = None) -> bool:
        """Drop what came and is not in force; if ``version`` is given, only what is of that one.

        Returns:
            whether an engine, which had taken a part of it, has no weights any more.
        """
        if version is None or (self.staged is not None and self.staged.version == version):
            self.staged = None
        if version is None or (self.parts and self.parts[0].header["version"] == version):
            self.parts = []
            return self._abandon_load()
        return False

    def allocate(self, nbytes: int, device: torch.device = _CPU) -> torch.Tensor:
        """Memory that no weights in force, staged or half received lie in."""
        taken = {id(part.payload) for part in self.parts}
        for staged in (self.current, self.staged):
            if staged is not None:
                taken.update(id(payload) for payload in staged.payloads)
        for memory in self._memory:
            if (memory.numel(), memory.device) == (nbytes, device) and id(memory) not in taken:
                return memory
        fresh = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._memory = [memory for memory in self._memory if id(memory) in taken] + [fresh]
        return fresh

    def _landing(self, payload: torch.Tensor) -> torch.device:
        """Where what is copied out of ``payload`` goes."""
        if not payload.is_cuda or self._binding is None:
            return _CPU
        return payload.device if self._bound is None else self._bound.home

    def _decoder(self, encoding: str) -> Decoder:
        assert self._schema is not None
        if encoding not in self._decoders:
            self._decoders[encoding] = decoder_for(encoding, self._schema)
        return self._decoders[encoding]

    def _follow(self) -> bool:
        """Find the tensors of the model again, if a part of it was replaced; returns whether one was.

        Raises:
            SchemaMismatchError: the model has other weights now.
        """
        binding = self._bound
        if binding is None or self._schema is None or not binding.is_stale():
            return False
        fresh = self._strategy.bind(binding.destination)
        self._schema.require_same(fresh.schema(), "the model, a part of which was replaced,", more=True)
        self._binding = fresh
        if self._store is not None:
            self._store.bind(fresh)
            self._store.forget()  # the new part has weights of its own
        return True

    def _stage(self, parts: list[WeightChunk]) -> Staged:
        self._follow()
        header = parts[0].header
        payloads = payloads_of(parts)
        decoder = self._decoder(header["encoding"])
        values = decoder.decode(payloads)
        for value in values[:1]:
            await_stream(value)  # other threads read on other streams
        staged = Staged(header["version"], header["group"], payloads, values, extra_of(parts))
        if self._store is None:
            staged.flat = payloads[0] if decoder.is_flat and payloads[0].is_cpu else None
        else:
            mine = [one for one in payloads if any(one is memory for memory in self._memory)]
            staged.values, kept = self._store.take(values, mine)
            staged.payloads = [memory for memory in payloads if memory is kept]
            staged.used_up = [memory for memory in payloads if memory is not kept]
        return self._prepared(staged)

    def _stage_delta(self, parts: list[WeightChunk]) -> Staged:
        self._follow()
        header, payloads = parts[0].header, payloads_of(parts)
        if self._store is None or self._schema is None:
            raise FormatError("a change, though no weights are kept here")
        deltas = [read_delta(header["encoding"], payload, self._schema) for payload in payloads]
        chain = [header["base"], *(delta.version for delta in deltas)]
        if chain[:-1] != [delta.base for delta in deltas] or chain[-1] != header["version"]:
            raise FormatError(f"changes that do not lead from {header['base']} to {header['version']}")
        self._store.require(header["base"])
        staged = Staged(
            header["version"],
            header["group"],
            [] if self.current is None else self.current.payloads,
            self._store.values,
            extra_of(parts),
            base=header["base"],
            deltas=deltas,
            used_up=payloads,
        )
        if self._binding is not None:
            self._binding.check_extra(staged.extra)
        return staged

    def _prepared(self, staged: Staged) -> Staged:
        """Do all that can fail or take long before anybody has to wait."""
        binding, schema = self._binding, self._schema
        if binding is not None and schema is not None:
            binding.check_extra(staged.extra)
            if staged.flat is not None and isinstance(binding, Binding) and not self._stable:
                staged.arena = self._arena_of(binding, schema)
            if staged.arena is None:
                staged.values = binding.prepare(schema.names, staged.values)
        return staged

    def _arena_of(self, binding: Binding, schema: WeightSchema) -> Arena | None:
        """Where the model is to lie; None if it is to point at payloads. Found out once for each model."""
        if self._home is None or self._home[0] is not binding:
            self._home = binding, Arena(schema, binding) if Arena.suits(schema, binding) else None
        return self._home[1]

    # -- inside the gate ---------------------------------------------------------------------------

    def begin(self, staged: Staged) -> None:
        """First half of applying it, which may fail and can be undone."""
        if self._follow() and self._bound is not None and self._schema is not None and staged.arena is None:
            staged.values = self._bound.prepare(self._schema.names, staged.values)
        if staged.base is not None and self._store is not None:
            self._store.require(staged.base)  # again: while it waited, the worker may have written
        if staged.arena is not None:
            self._look_into(staged.arena, staged)
        if self._binding is not None:
            staged.undo = self._binding.exchange_extra(staged.extra)

    def _look_into(self, arena: Arena, staged: Staged) -> None:
        """See how the model can come to have ``staged``; until now its tensors may have been moved."""
        binding, schema = self._binding, self._schema
        same = arena.binding is binding
        staged.lies_there = same and arena.holds_model()
        if staged.lies_there or not isinstance(binding, Binding) or schema is None:
            return
        ready = binding.prepare(schema.names, staged.values)
        if not same or not all(map(operator.is_, ready, staged.values)):
            staged.arena, staged.values = None, ready
            self._home = binding, None  # from now on converted before anybody has to wait

    def switch(self, staged: Staged) -> None:
        """Second half: it is in force from now on."""
        if staged.deltas and self._store is not None:
            self._store.apply(staged.deltas, staged.version)
            staged.deltas = []
            if self._bound is None:
                self._write(staged)
        else:
            self._write(staged)
            if self._store is not None:
                self._store.switched(staged.version)
        staged.flat = staged.arena = None
        self.current, self.version = staged, staged.version

    def _write(self, staged: Staged) -> None:
        assert self._schema is not None
        if isinstance(self._binding, EngineBinding):
            self._load(self._binding, staged, self._schema)
        elif self._binding is None:
            return
        elif staged.arena is None or staged.flat is None:
            self._binding.write(self._schema.names, staged.values, stay=self._stable)
        else:
            staged.arena.write(staged.flat, point=not staged.lies_there)
            staged.used_up, staged.payloads, staged.values = staged.payloads, [], staged.arena.values

    def named(self, staged: Staged) -> NamedWeights:
        """The weights of a version that is in force."""
        assert self._schema is not None
        weights = zip(self._schema.names, staged.values, strict=bool(staged.values))
        return NamedWeights(dict(weights), staged.extra)

    # -- engines -----------------------------------------------------------------------------------

    def _load(self, binding: EngineBinding, staged: Staged, schema: WeightSchema) -> None:
        """The engine takes all of a version, and nothing of it is kept here."""
        self._loading = binding.begin(staged.version)
        try:
            self._loading.load(zip(schema.names, staged.values, strict=True))
            self._loading.finish()
        except BaseException:
            self._abandon_load()
            raise
        self._loading = None
        if self._store is None:
            staged.used_up, staged.payloads, staged.values = staged.payloads, [], []

    def _hand_on(self, binding: EngineBinding, chunk: WeightChunk, schema: WeightSchema) -> Staged | None:
        """The engine takes what is whole with a chunk that just came; the version, if it has all."""
        header = chunk.header
        if self._loading is None:
            self._loading = binding.begin(header["version"])
        self._loading.take(chunk, self._decoder(header["encoding"]), schema)
        if chunk.payload is not None:
            self._release(chunk.payload)
        self.parts.append(replace(chunk, payload=None))
        if len(self.parts) < header["count"]:
            return None
        self._loading.finish()
        loading, self._loading, self.parts = self._loading, None, []
        self.current = Staged(
            header["version"], None, [], [], {}, arrived=loading.since, seconds=loading.seconds
        )
        self.version = header["version"]
        return self.current

    def _abandon_load(self) -> bool:
        """An engine that was given a part of a version has none any more."""
        loading, self._loading = self._loading, None
        if loading is None:
            return False
        self.version = None
        if self._store is not None:
            self._store.forget()
        loading.abort()
        return True

    # -- leaving -----------------------------------------------------------------------------------

    @property
    def lies_in_payloads(self) -> bool:
        """Whether the version in force lies in memory that is not this process's own."""
        current = self.current
        return current is not None and not all(
            any(one is mine for mine in self._memory) for one in current.payloads
        )

    def own(self) -> None:
        """Take the version in force out of that memory; nobody may compute with it meanwhile."""
        current, binding = self.current, self._bound
        assert current is not None
        current.values = _copies(current.values)
        if binding is not None and binding.points and not self._stable and self._schema is not None:
            binding.switch(self._schema.names, current.values)
            binding.finish_kernels()  # those that were given the former memory
        current.payloads = []

    def drop_views(self) -> None:
        """Remember no views into payloads."""
        self._decoders.clear()

    def close(self) -> None:
        """Let go of all memory; the model keeps the version it has."""
        self.unguard()
        self.current = self.staged = None
        self.parts, self._memory = [], []
        self._decoders.clear()


@torch.inference_mode(False)  # the model may learn later
def _copies(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Clones that are finished; what is tied stays tied."""
    twins = {memory_identity(value) or id(value): value for value in values}
    clones = {key: value.clone() for key, value in twins.items()}
    for clone in clones.values():
        await_stream(clone)
    return [clones[memory_identity(value) or id(value)] for value in values]
