"""The receiving end of a scheme: joins, stages updates, and makes each visible at one moment."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weight_update.arena import Arena
from weight_update.binding import Binding
from weight_update.chunks import Kind, WeightChunk, WeightSchema, memory_identity
from weight_update.encodings import Decoder, Delta, decoder_for, read_delta
from weight_update.engine import InferenceEngine
from weight_update.engine_binding import EngineBinding, Loading
from weight_update.errors import (
    FormatError,
    JoinRefusedError,
    LifecycleError,
    LinkClosedError,
    SchemaMismatchError,
    SyncTimeoutError,
    TransportError,
    UnreachableMemoryError,
    without_frames,
)
from weight_update.frames import extra_of, payloads_of
from weight_update.gate import Gate
from weight_update.joint import run_jointly
from weight_update.kernels import await_stream
from weight_update.named import NamedWeights
from weight_update.own_weights import Behind, OwnWeights
from weight_update.strategy import WeightStrategy
from weight_update.transports.base import TransportBackend

__all__ = ["Receiver"]

_log = logging.getLogger(__name__)
_REJOIN_SECONDS = 10.0
_GOODBYE_SECONDS = 1.0
_IDLE_SECONDS = 0.05
_PARTING_SECONDS = 3.0
_CPU = torch.device("cpu")


@dataclass
class _Staged:
    """An update that arrived whole and was checked, not yet visible."""

    version: int
    group: str | None
    payloads: list[torch.Tensor]  # memory that the values lie in
    values: list[torch.Tensor]
    extra: dict[str, Any]
    arrived: float = field(default_factory=time.perf_counter)
    undo: Callable[[], None] = lambda: None
    base: int | None = None
    deltas: list[Delta] = field(default_factory=list)
    used_up: list[torch.Tensor] = field(default_factory=list)  # payloads that are free once it is applied
    flat: torch.Tensor | None = None  # the payload that goes into the arena


class Receiver:
    """Keeps one model at the version its sender last sent.

    Call sequence: :meth:`connect` joins the sender and applies the first weights; :meth:`start` then runs
    a background thread that applies updates as they come; :meth:`close` ends it.

    Args:
        link: this end of the link.
        strategy: how weights enter the model.
        gate: when they may.
        model: module, TensorDict, dict or :class:`~weight_update.InferenceEngine` to keep current; None only
            keeps the weights for :meth:`receive`.
        worker: index of this receiver.
        token: what lets it in.
        stable_addresses: copy into the model's tensors instead of pointing them at received memory.
        timeout: seconds that an update waits for the running forward pass to end.
        on_switched: called with the version at the moment it becomes visible, inside the gate.
        on_applied: called with version and what gives the weights, after that and outside the gate, before
            the sender hears of it.

    Attributes:
        version: the one in force; None before the first, and after an engine failed to load one.
        error: why nothing more comes.
    """

    def __init__(
        self,
        *,
        link: TransportBackend,
        strategy: WeightStrategy,
        gate: Gate,
        model: Any,
        worker: int,
        token: str,
        stable_addresses: bool,
        timeout: float,
        on_switched: Callable[[int], None],
        on_applied: Callable[[int, Callable[[], NamedWeights]], None],
    ) -> None:
        self.link, self.gate, self.worker = link, gate, worker
        self.version: int | None = None
        self.error: Exception | None = None
        self._strategy, self._token, self._timeout = strategy, token, timeout
        self._stable = stable_addresses
        self._on_switched, self._on_applied = on_switched, on_applied
        self._schema: WeightSchema | None = None
        self._store: OwnWeights | None = None
        self._arena: Arena | None = None
        self._decoders: dict[str, Decoder] = {}
        self._memory: list[torch.Tensor] = []
        self._parts: list[WeightChunk] = []
        self._unwanted: int | None = None  # a version that failed: the rest of it is not read
        self._current: _Staged | None = None
        self._staged: _Staged | None = None
        self._loading: Loading | None = None  # what an engine has begun and not finished
        self._left: list[torch.Tensor] = []  # payloads switched away from, not yet released
        self._applied = 0
        self._pid = os.getpid()
        self._returned: int | None = None
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._busy = threading.RLock()  # held while a frame is handled and answered
        self._unguard: Callable[[], None] | None = None
        self._guarded_outside = False
        self._binding: Binding | EngineBinding | None = None
        self._model = model  # until it is bound

    # -- joining -----------------------------------------------------------------------------------

    def bind(self, model: Any) -> None:
        """Keep ``model`` current from now on, beginning with the version that is in force.

        Raises:
            LifecycleError: an engine is involved, beside which no weights are kept.
        """
        if self._applied and (isinstance(model, InferenceEngine) or isinstance(self._binding, EngineBinding)):
            raise LifecycleError(
                "an engine cannot be exchanged while connected; make a receiver of the new one"
            )
        if self._unguard is not None:
            self._unguard()
            self._unguard = None
        self._model = self._arena = None
        if isinstance(model, InferenceEngine):
            self._binding = EngineBinding(model)
        else:
            self._binding = None if model is None else self._strategy.bind(model)
        if isinstance(model, torch.nn.Module) and not self._guarded_outside:
            self._unguard = self.gate.guard(model)
        if self._current is not None and isinstance(self._binding, Binding) and self._schema is not None:
            self._schema.require_same(self._binding.schema(), "the new model", more=True)
            self.gate.run(self._fill_new_model, self._timeout)

    def _fill_new_model(self) -> None:
        assert self._current is not None
        if self._store is not None:
            self._current.values = list(self._store.values)
        self._write(self._prepared(self._current))
        if self._store is not None:
            self._store.bind(self._bound)

    @property
    def _bound(self) -> Binding | None:
        """The model, if its tensors can be kept in memory of ours."""
        return self._binding if isinstance(self._binding, Binding) else None

    def guard_outside(self) -> None:
        """The caller holds the gate around every forward pass itself; drop the hooks of the model."""
        self._guarded_outside = True
        if self._unguard is not None:
            self._unguard()
            self._unguard = None

    def connect(self, timeout: float, *, again: bool = False) -> None:
        """Join the sender and apply the weights it has now.

        Args:
            timeout: seconds.
            again: this receiver has weights, and keeps them if the sender has none to give now.

        Raises:
            UnsupportedSourceError: the model has weights that cannot be synchronized.
            SchemaMismatchError: the model's weights are not the sender's; both sides stay usable.
            JoinRefusedError: the sender does not let this worker in.
            SyncTimeoutError: it did not answer within ``timeout`` seconds.
            TransportError: it cannot be reached.
        """
        try:
            self._join(timeout, again)
        except BaseException:
            self._forget()
            raise

    def _join(self, timeout: float, again: bool) -> None:
        deadline = time.monotonic() + timeout
        problem: Exception | None = None
        mine: WeightSchema | None = None
        try:
            if self._model is not None:
                self.bind(self._model)
            mine = None if self._binding is None else self._binding.schema()
        except Exception as reason:  # noqa: BLE001 - whatever it is, the sender must hear of it
            problem = reason
        hello = {
            "token": self._token,
            "worker": self.worker,
            "pid": os.getpid(),
            "version": self.version,
            "schema": None if mine is None else mine.to_header(),
            "error": None if problem is None else "\n\n".join(_told(problem)),
        }
        self.link.restart(timeout)
        self.link.send_chunk(WeightChunk(Kind.HELLO, hello), timeout)
        if problem is not None:
            raise problem
        reply = self._expect(deadline)
        while reply.kind in (Kind.UPDATE, Kind.COMMIT, Kind.ABORT):  # meant for the worker before this one
            reply = self._expect(deadline)
        if reply.kind is Kind.REFUSED:
            raise _refusal(reply)
        if reply.kind is not Kind.WELCOME:
            raise FormatError(f"expected WELCOME, got {reply.kind.name}")
        applied = self._applied
        error = self._handle(reply)
        if again and reply.header["version"] is None:
            return  # nothing will come before the next send()
        while error is None and self._applied == applied:
            error = self._handle(self._expect(deadline))
        if error is not None:
            raise error

    def start(self) -> None:
        """Apply updates in a background thread from now on."""
        self._thread = threading.Thread(
            target=self._run, name=f"weight_update-receiver-{self.worker}", daemon=True
        )
        self._thread.start()

    def abandon(self) -> None:
        """Give up after a failed :meth:`connect`, leaving the link open."""
        if self._unguard is not None:
            self._unguard()
            self._unguard = None

    def close(self) -> None:
        """Leave; the model keeps the version it has."""
        if os.getpid() != self._pid:
            return  # a forked child does not speak for its parent
        self._closing = True
        self.gate.look_again()  # shutdown() inside hold() does not wait for its end
        if self._busy.acquire(timeout=_GOODBYE_SECONDS):  # the sender hears what was applied, then goodbye
            self._move_out()
            with contextlib.suppress(TransportError, TimeoutError):  # the sender may have left first
                self.link.send_chunk(WeightChunk(Kind.GOODBYE, {}), _GOODBYE_SECONDS)
            self._forget()
            self._busy.release()
        self.link.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self.abandon()
        self._current = self._staged = None
        self._left, self._parts, self._memory = [], [], []
        self._decoders.clear()
        with self._news:
            self._news.notify_all()

    # -- updates -----------------------------------------------------------------------------------

    def receive(self, timeout: float | None) -> Any | None:
        """The weights of the next version that was not returned yet, or None on timeout.

        Raises:
            LinkClosedError: the sender is gone and nothing new is left.
        """
        return self._strategy.export(self.weights()) if self.await_next(timeout) else None

    def await_next(self, timeout: float | None) -> bool:
        """As :meth:`receive`, without making anything of the weights: whether there is a next version."""
        with self._news:
            self._news.wait_for(lambda: self._has_news or self.error or self._closing, timeout)
            if not self._has_news:
                if self.error is not None:
                    raise self.error
                return False
            self._returned = self.version
            return True

    @property
    def _has_news(self) -> bool:
        return self.version is not None and self.version != self._returned

    def mark_returned(self) -> None:
        """Let :meth:`receive` wait for versions after the one in force."""
        self._returned = self.version

    def weights(self) -> NamedWeights:
        """The weights in force: live tensors of the model, or copies where there is no model.

        None of an engine.
        """
        if self._binding is not None:
            return self._binding.read()
        if self._current is None or self._schema is None:
            return NamedWeights({})
        with self.gate.hold():
            copies = _copies(self._current.values)
            extra = dict(self._current.extra)
        return NamedWeights(dict(zip(self._schema.names, copies, strict=True)), extra)

    def _run(self) -> None:
        while not self._closing:
            try:
                chunk = self._next(_IDLE_SECONDS if self._left else None)
                if chunk is None:
                    self._tidy()
                elif chunk.kind is Kind.GOODBYE:
                    return self._end(LinkClosedError("the sender was shut down"))
                with self._busy:
                    if chunk is not None and not self._closing:
                        self._handle(chunk)
            except (TransportError, FormatError, TimeoutError) as error:
                if isinstance(error, FormatError):
                    _log.warning("worker %d joins again, because of what came: %s", self.worker, error)
                if self._closing or not self._rejoin():
                    return self._end(error)
            except Exception as error:  # noqa: BLE001 - the thread ends in order, whatever it is
                _log.exception("worker %d: receiving updates ended", self.worker)
                self.link.disconnect()  # the sender learns of it, if it lives
                return self._end(error)
        with self._busy:
            return self._forget()

    def _next(self, timeout: float | None) -> WeightChunk | None:
        """The next frame; the sender hears of one whose payload cannot be reached here."""
        try:
            return self.link.recv_chunk(timeout, self._allocate)
        except UnreachableMemoryError as error:
            self._tell_failed(error.version, error)
            raise

    def _end(self, error: Exception) -> None:
        with self._busy:
            self._forget()
        with self._news:
            self.error = without_frames(error)
            self._news.notify_all()
        if self.link.lends:
            with self._busy:
                self._move_out()
                self.link.close()  # the sender waits for that

    def _move_out(self) -> None:
        """Take the weights out of memory that ends with the sender, and refer to none of it any more."""
        if not self.link.lends:
            return
        self._decoders.clear()
        self._forget()
        self._left = []
        current = self._current
        if current is None or all(any(one is mine for mine in self._memory) for one in current.payloads):
            return
        ending = threading.current_thread() is self._thread
        try:
            try:
                self.gate.run(self._own_current, _PARTING_SECONDS, lambda: ending and self._closing)
            except LifecycleError:  # shutdown() inside hold(): this thread computes nothing now
                self._own_current()
        except LinkClosedError:
            _log.debug("worker %d: left to shutdown(), which has begun", self.worker)
        except (SyncTimeoutError, torch.OutOfMemoryError) as error:
            _log.warning(
                "worker %d: the weights stay in the sender's memory, and are gone when its process ends: %s",
                self.worker,
                error,
            )

    def _own_current(self) -> None:
        current, binding = self._current, self._bound
        assert current is not None
        current.values = _copies(current.values)
        if binding is not None and binding.points and not self._stable and self._schema is not None:
            binding.switch(self._schema.names, current.values)
            binding.finish_kernels()  # those that were given the former memory
        current.payloads = []

    def _rejoin(self) -> bool:
        try:
            with self._busy:
                self.connect(_REJOIN_SECONDS, again=True)
        except Exception as error:  # noqa: BLE001 - the thread ends in order, whatever it is
            if not isinstance(error, TransportError | TimeoutError):
                _log.warning("worker %d could not join again", self.worker, exc_info=error)
            self.link.disconnect()  # the sender learns of it, if it lives
            return False
        return True

    def _expect(self, deadline: float) -> WeightChunk:
        left = deadline - time.monotonic()
        chunk = self._next(left) if left > 0 else None
        if chunk is None:
            raise SyncTimeoutError(
                f"worker {self.worker}: the sender did not answer in time; has it called connect()?"
            )
        return chunk

    def _handle(self, chunk: WeightChunk) -> Exception | None:
        """Act on one frame; an error goes to the sender and is returned."""
        version = chunk.header.get("version", 0)
        try:
            if chunk.kind is Kind.UPDATE:
                try:
                    self._update(chunk)
                except Behind as reason:
                    _log.warning("worker %d asks for all weights: %s", self.worker, reason)
                    self._forget()
                    self.link.send_chunk(WeightChunk(Kind.BEHIND, {"version": version}), self._timeout)
            elif chunk.kind is Kind.COMMIT:
                self._commit(version)
            elif chunk.kind is Kind.ABORT:
                loading = self._loading
                self._forget(version)
                if loading is not None and self._loading is None:  # an engine has a part of it
                    self.link.send_chunk(WeightChunk(Kind.BEHIND, {"version": version}), self._timeout)
            elif chunk.kind is Kind.WELCOME:  # the answer to an earlier attempt came late; this one follows
                self._begin_with(chunk)
            else:
                raise FormatError(f"unexpected {chunk.kind.name} frame")
        except (TransportError, FormatError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the sender must hear of it
            self._forget()
            self._unwanted = version
            self._tell_failed(version, error)
            return error
        return None

    def _tell_failed(self, version: int, error: Exception) -> None:
        summary, text = _told(error)
        failed = {
            "version": version,
            "error": summary,
            "traceback": text,
            "kept": self.version is not None,
        }
        self.link.send_chunk(WeightChunk(Kind.FAILED, failed), self._timeout)

    def _begin_with(self, welcome: WeightChunk) -> None:
        header = welcome.header
        self._schema = WeightSchema.from_header(header["schema"])
        self._forget()
        self._decoders.clear()
        self._store = self._arena = None
        if header["keep"]:
            self._store = OwnWeights(self._schema, self._bound)
            if header["digests"] is not None:
                named = NamedWeights({}) if self._binding is None else self._binding.read()
                self._store.adopt(header["version"], named.tensors, header["digests"])

    def _update(self, chunk: WeightChunk) -> None:
        header = chunk.header
        if self._schema is None or header["schema"] != self._schema.digest:
            raise FormatError("an update for another schema")
        if header["index"] == 0:
            self._unwanted = None
        if header["version"] == self._unwanted:
            if chunk.payload is not None:
                self.link.release(chunk.payload)
            return
        if header["index"] != len(self._parts):
            raise FormatError(f"chunk {header['index']} came, {len(self._parts)} was next")
        self._tidy()
        engine = self._binding if isinstance(self._binding, EngineBinding) and self._store is None else None
        if engine is not None and engine.hands_on(header, self._decoder):
            self._hand_on(engine, chunk)
        else:
            self._collect(chunk)

    def _landing(self, payload: torch.Tensor) -> torch.device:
        """Where what is copied out of ``payload`` goes."""
        if not payload.is_cuda or self._binding is None:
            return _CPU
        return payload.device if self._bound is None else self._bound.home

    def _collect(self, chunk: WeightChunk) -> None:
        """Keep a chunk until all are here."""
        header = chunk.header
        if header["base"] is None and chunk.payload is not None:
            allocate = functools.partial(self._allocate, device=self._landing(chunk.payload))
            fed = self._decoder(header["encoding"]).feed(header["index"], chunk.payload, allocate)
            if fed is not chunk.payload:
                self.link.release(chunk.payload)
                chunk = replace(chunk, payload=fed)
        self._parts.append(chunk)
        if len(self._parts) < header["count"]:
            self._say_taken(header)
            return
        parts, self._parts = self._parts, []
        self._staged = self._stage_delta(parts) if header["base"] is not None else self._stage(parts)
        if header["commit"]:
            self._commit(header["version"])
        else:
            staged = WeightChunk(Kind.STAGED, {"version": header["version"]})
            self.link.send_chunk(staged, self._timeout)

    def _say_taken(self, header: Mapping[str, Any]) -> None:
        taken = {"version": header["version"], "index": header["index"]}
        self.link.send_chunk(WeightChunk(Kind.TAKEN, taken), self._timeout)

    def _decoder(self, encoding: str) -> Decoder:
        assert self._schema is not None
        if encoding not in self._decoders:
            self._decoders[encoding] = decoder_for(encoding, self._schema)
        return self._decoders[encoding]

    def _tidy(self) -> None:
        """Let go of the memory that the last update left; not at once, while others still wait for a core."""
        for payload in self._left:
            self.link.release(payload)
        self._left = []

    def _stage(self, parts: list[WeightChunk]) -> _Staged:
        header = parts[0].header
        payloads = payloads_of(parts)
        decoder = self._decoder(header["encoding"])
        values = decoder.decode(payloads)
        for value in values[:1]:
            await_stream(value)  # other threads read on other streams
        staged = _Staged(header["version"], header["group"], payloads, values, extra_of(parts))
        if self._store is None:
            staged.flat = payloads[0] if decoder.is_flat and payloads[0].is_cpu else None
        else:
            mine = [one for one in payloads if any(one is memory for memory in self._memory)]
            staged.values, kept = self._store.take(values, mine)
            staged.payloads = [memory for memory in payloads if memory is kept]
            staged.used_up = [memory for memory in payloads if memory is not kept]
        return self._prepared(staged)

    def _stage_delta(self, parts: list[WeightChunk]) -> _Staged:
        header, payloads = parts[0].header, payloads_of(parts)
        if self._store is None or self._schema is None:
            raise FormatError("a change, though no weights are kept here")
        deltas = [read_delta(header["encoding"], payload, self._schema) for payload in payloads]
        chain = [header["base"], *(delta.version for delta in deltas)]
        if chain[:-1] != [delta.base for delta in deltas] or chain[-1] != header["version"]:
            raise FormatError(f"changes that do not lead from {header['base']} to {header['version']}")
        self._store.require(header["base"])
        current = self._current
        staged = _Staged(
            header["version"],
            header["group"],
            [] if current is None else current.payloads,
            self._store.values,
            extra_of(parts),
            base=header["base"],
            deltas=deltas,
            used_up=payloads,
        )
        if self._binding is not None:
            self._binding.check_extra(staged.extra)
        return staged

    def _prepared(self, staged: _Staged) -> _Staged:
        """Do all that can fail or take long before anybody has to wait."""
        binding, schema = self._binding, self._schema
        if binding is not None and schema is not None:
            binding.check_extra(staged.extra)
            if staged.flat is not None and self._bound is not None and not self._stable:
                if self._arena is None and Arena.suits(schema, self._bound):
                    self._arena = Arena(schema, self._bound)
                if self._arena is not None and self._arena.look():
                    return staged
            ready = binding.prepare(schema.names, staged.values)
            if self._arena is None or not all(map(operator.is_, ready, staged.values)):
                staged.flat = None
            staged.values = ready
        return staged

    def _commit(self, version: int) -> None:
        staged, self._staged = self._staged, None
        if staged is None or staged.version != version:
            raise LinkClosedError(f"version {version} is to be applied but was not received")
        before = self._current
        if staged.group is None:
            stall = self._through_gate([(self, staged)])
        else:
            key, size = f"{staged.group}:{self.worker}", int(staged.group.rpartition("/")[2])
            stall = run_jointly(key, size, (self, staged), self._through_gate, 2 * self._timeout)
        self._after(staged, stall, before)

    def _through_gate(self, members: list[tuple[Receiver, _Staged]]) -> float:
        return self.gate.run(lambda: self._apply_all(members), self._timeout, lambda: self._closing)

    @staticmethod
    def _apply_all(members: list[tuple[Receiver, _Staged]]) -> None:
        """Inside the gate: all members switch, or none."""
        begun: list[_Staged] = []
        try:
            for receiver, staged in members:
                receiver._begin(staged)
                begun.append(staged)
        except BaseException:
            for staged in begun:
                staged.undo()
            raise
        for receiver, staged in sorted(members, key=lambda one: one[0]._bound is not None):
            receiver._switch(staged)  # engines first: of these some can fail yet

    def _begin(self, staged: _Staged) -> None:
        if staged.base is not None and self._store is not None:
            self._store.require(staged.base)  # again: while it waited, the worker may have written
        if self._binding is not None:
            staged.undo = self._binding.exchange_extra(staged.extra)

    def _switch(self, staged: _Staged) -> None:
        if staged.deltas and self._store is not None:
            self._store.apply(staged.deltas, staged.version)
            staged.deltas = []
            if self._bound is None:
                self._write(staged)
        else:
            self._write(staged)
            if self._store is not None:
                self._store.switched(staged.version)
        self._in_force(staged)

    def _in_force(self, staged: _Staged) -> None:
        self._current = staged
        self.version = staged.version
        self._applied += 1
        self._on_switched(staged.version)

    def _write(self, staged: _Staged) -> None:
        assert self._schema is not None
        if isinstance(self._binding, EngineBinding):
            self._load(self._binding, staged)
        elif staged.flat is not None and self._arena is not None:
            self._arena.write(staged.flat)
            staged.used_up, staged.payloads, staged.values = staged.payloads, [], self._arena.values
            staged.flat = None
        elif self._binding is not None:
            self._binding.write(self._schema.names, staged.values, stay=self._stable)

    def _after(self, staged: _Staged, stall: float, before: _Staged | None) -> None:
        with self._news:
            self._news.notify_all()
        assert self._schema is not None
        self._on_applied(staged.version, functools.partial(_named, self._schema, staged))
        applied = {
            "version": staged.version,
            "apply_seconds": time.perf_counter() - staged.arrived,
            "stall_seconds": stall,
        }
        self.link.send_chunk(WeightChunk(Kind.APPLIED, applied), self._timeout)
        self._left = [*staged.used_up, *(before.payloads if before is not None else ())]
        self._left = [memory for memory in self._left if all(memory is not one for one in staged.payloads)]

    # -- engines -----------------------------------------------------------------------------------

    def _load(self, binding: EngineBinding, staged: _Staged) -> None:
        """Inside the gate: the engine takes all of a version, and nothing of it is kept here."""
        assert self._schema is not None
        self._loading = binding.begin(staged.version)
        try:
            self._loading.load(zip(self._schema.names, staged.values, strict=True))
            self._loading.finish()
        except BaseException:
            self._abandon_load()
            raise
        self._loading = None
        if self._store is None:
            staged.used_up, staged.payloads, staged.values = staged.payloads, [], []

    def _hand_on(self, binding: EngineBinding, chunk: WeightChunk) -> None:
        """The engine takes what is whole with a chunk that just came."""
        header = chunk.header
        assert self._schema is not None
        if self._loading is None:
            self._loading = binding.begin(header["version"])
        self._loading.take(chunk, self._decoder(header["encoding"]), self._schema)
        if chunk.payload is not None:
            self.link.release(chunk.payload)
        self._parts.append(replace(chunk, payload=None))
        if len(self._parts) < header["count"]:
            self._say_taken(header)
            return
        self._loading.finish()
        loading, self._loading, self._parts, before = self._loading, None, [], self._current
        staged = _Staged(header["version"], None, [], [], {}, arrived=loading.since)
        self._in_force(staged)
        self._after(staged, loading.seconds, before)

    def _forget(self, version: int | None = None) -> None:
        """Drop what came and is not in force; if ``version`` is given, only what is of that one."""
        if version is None or (self._staged is not None and self._staged.version == version):
            self._staged = None
        if version is None or (self._parts and self._parts[0].header["version"] == version):
            self._parts = []
            self._abandon_load()

    def _abandon_load(self) -> None:
        """An engine that was given a part of a version has none any more."""
        loading, self._loading = self._loading, None
        if loading is None:
            return
        self.version = None
        if self._store is not None:
            self._store.forget()
        loading.abort()

    def _allocate(self, nbytes: int, device: torch.device = _CPU) -> torch.Tensor:
        """Memory that no weights in force, staged or half received lie in."""
        taken = {id(part.payload) for part in self._parts}
        for staged in (self._current, self._staged):
            if staged is not None:
                taken.update(id(payload) for payload in staged.payloads)
        for memory in self._memory:
            if (memory.numel(), memory.device) == (nbytes, device) and id(memory) not in taken:
                return memory
        fresh = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._memory = [memory for memory in self._memory if id(memory) in taken] + [fresh]
        return fresh


def _named(schema: WeightSchema, staged: _Staged) -> NamedWeights:
    weights = zip(schema.names, staged.values, strict=bool(staged.values))
    return NamedWeights(dict(weights), staged.extra)


def _copies(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Clones that are finished; what is tied stays tied."""
    twins = {memory_identity(value) or id(value): value for value in values}
    clones = {key: value.clone() for key, value in twins.items()}
    for clone in clones.values():
        await_stream(clone)
    return [clones[memory_identity(value) or id(value)] for value in values]


def _told(error: Exception) -> tuple[str, str]:
    """What the sender hears of an error: in short, and where it came from."""
    return f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))


def _refusal(reply: WeightChunk) -> Exception:
    problems = tuple(str(line) for line in reply.header["problems"])
    if problems:
        return SchemaMismatchError(reply.header["reason"], problems)
    return JoinRefusedError(f"the sender refused this worker: {reply.header['reason']}")
