"""The sending end of a scheme: encodes once, serves every worker, and keeps account of who has what."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from weight_update.buffers import BufferPool, Slot, Update
from weight_update.chunks import Kind, WeightChunk, WeightSchema, differences, memory_identity, untied
from weight_update.encodings import Encoder
from weight_update.errors import (
    FormatError,
    JoinRefusedError,
    LinkClosedError,
    SchemaMismatchError,
    SyncFailedError,
    SyncTimeoutError,
    TransportError,
    UnsupportedSourceError,
    WorkerError,
)
from weight_update.named import NamedWeights
from weight_update.peer import Peer
from weight_update.report import SyncReport
from weight_update.strategy import WeightStrategy
from weight_update.transports.base import TransportBackend, update_chunks

__all__ = ["Sender"]

_MAX_BUFFERS = 4
_LOOK_SECONDS = 0.2


class Sender:
    """Sends versions of weights to workers.

    Args:
        links: the sender's end for each worker index.
        schemas: what each worker is to have; workers with equal schemas share the encoding.
        strategy: how weights are read and encoded.
        token: workers must show it to get in.
        timeout: seconds an update may take until all workers have applied it.
    """

    def __init__(
        self,
        links: Mapping[int, TransportBackend],
        schemas: Mapping[int, WeightSchema],
        strategy: WeightStrategy,
        token: str,
        timeout: float,
    ) -> None:
        self.version: int | None = None
        self.timeout = timeout
        self._strategy, self._token = strategy, token
        self._peers = {idx: Peer(idx, link, schemas[idx]) for idx, link in links.items()}
        self._numbers = -1
        self._moved = threading.Condition(threading.RLock())
        self._publishing = threading.Lock()
        first = next(iter(links.values()))
        self._shared = first.shares_memory
        self._pool = BufferPool(first)
        try:
            for schema in {schema.digest: schema for schema in schemas.values()}.values():
                self._pool.reserve(schema.nbytes)
        except BaseException:
            self._pool.close()  # whoever looks at the error keeps no memory with it
            raise
        self._encoders: dict[str, Encoder] = {}
        self._closed = False
        self._pid = os.getpid()
        self._helpers: ThreadPoolExecutor | None = None

    @property
    def worker_versions(self) -> dict[int, int | None]:
        """The version each worker has applied; None before its first."""
        return {idx: peer.version for idx, peer in self._peers.items()}

    @property
    def workers(self) -> tuple[int, ...]:
        """Indices of all workers."""
        return tuple(sorted(self._peers))

    @property
    def serving(self) -> bool:
        """Whether :meth:`connect` was called, and :meth:`close` was not."""
        return self._numbers >= 0 and not self._closed

    def schema(self, idx: int) -> WeightSchema:
        """What worker ``idx`` is to have."""
        return self._peers[idx].schema

    # -- joining -----------------------------------------------------------------------------------

    def connect(
        self,
        weights: Mapping[int, NamedWeights],
        timeout: float,
        alive: Callable[[int], bool] | None = None,
    ) -> SyncReport:
        """Give the first weights to every worker and wait until all have them.

        Args:
            weights: by worker; workers that share an object share its encoding.
            timeout: seconds.
            alive: tells whether the process of a worker lives, if the caller knows.

        Raises:
            SchemaMismatchError: a worker's model has other weights.
            SyncTimeoutError: workers did not come in time; the message names them.
            SyncFailedError: anything else went wrong in a worker.
        """
        with self._moved:
            for peer in self._peers.values():
                peer.lost, peer.failures = None, {}
            report, _ = self._publish(weights, commit=True, group=None)
        for peer in self._peers.values():
            self._catch_up(peer)
            if peer.thread is None:
                peer.thread = threading.Thread(
                    target=self._serve,
                    args=(peer,),
                    name=f"weight_update-peer-{peer.idx}",
                    daemon=True,
                )
                peer.thread.start()
        deadline = time.monotonic() + timeout
        with self._moved:
            while self._unsettled() and time.monotonic() < deadline:
                for peer in self._unsettled():
                    if alive is not None and not alive(peer.idx):
                        peer.lost = LinkClosedError("its process died before it connected")
                self._moved.wait(_LOOK_SECONDS)
            failures = {
                peer.idx: error for peer in self._peers.values() if (error := peer.trouble()) is not None
            }
            late = [peer.idx for peer in self._unsettled()]
        _raise_connect(failures, late, timeout)
        for peer in self._peers.values():
            report.apply_seconds[peer.idx] = peer.apply_seconds
            report.stall_seconds[peer.idx] = peer.stall_seconds
        return report

    def _unsettled(self) -> list[Peer]:
        return [
            peer
            for peer in self._peers.values()
            if peer.trouble() is None and (not peer.joined or peer.version is None)
        ]

    def _welcome(self, peer: Peer, hello: WeightChunk) -> None:
        header = hello.header
        error: Exception | None = None
        if not hello.shows(self._token):
            error = JoinRefusedError("wrong token")
        elif header["schema"] is not None:
            try:
                peer.schema.require_same(WeightSchema.from_header(header["schema"]), f"worker {peer.idx}")
            except (SchemaMismatchError, FormatError) as mismatch:
                error = mismatch
        if error is not None:
            problems = error.problems if isinstance(error, SchemaMismatchError) else ()
            reason = str(error).partition("\n")[0]
            refused = {"reason": reason, "problems": list(problems)}
            self._say(peer, WeightChunk(Kind.REFUSED, refused))
            with self._moved:
                peer.joined, peer.lost = False, error
                self._moved.notify_all()
            return
        welcome = {"schema": peer.schema.to_header(), "strategy": self._strategy.extract_as}
        with peer.sending:  # an update that is just being sent goes to the old link, or not at all
            with self._moved:
                peer.let_go()
            peer.link.send_chunk(WeightChunk(Kind.WELCOME, welcome), self.timeout)
            with self._moved:
                peer.joined, peer.lost, peer.pid = True, None, header["pid"]
        self._catch_up(peer)

    # -- sending -----------------------------------------------------------------------------------

    def publish(
        self,
        weights: Mapping[int, NamedWeights],
        *,
        commit: bool = True,
        group: str | None = None,
    ) -> SyncReport:
        """Encode and send; does not wait for workers.

        Args:
            weights: by worker; workers that share an object share its encoding.
            commit: False leaves it staged in the workers until :meth:`commit` or :meth:`abort`.
            group: see :func:`~weight_update.send_together`.

        Raises:
            SchemaMismatchError: the weights are not those of the schema; nothing was sent.
        """
        with self._publishing:
            with self._moved:
                for idx in weights:
                    self._peers[idx].forget_old_failures()
            report, updates = self._publish(weights, commit=commit, group=group)
            start = time.perf_counter()
            ready = []
            with self._moved:
                for idx in weights:
                    if self._begin(self._peers[idx]) is not None:
                        ready.append(self._peers[idx])
            self._transmit_all(ready)
            report.seconds["send"] = time.perf_counter() - start
            handed_over = set(updates.values()) if self._shared else list(updates.values())
            report.wire_bytes = sum(update.payload_bytes for update in handed_over)
            return report

    def _publish(
        self, weights: Mapping[int, NamedWeights], *, commit: bool, group: str | None
    ) -> tuple[SyncReport, dict[int, Update]]:
        start = time.perf_counter()
        for idx, named in weights.items():
            _require_schema(self._peers[idx].schema, named)
        self._numbers += 1
        version = self._numbers
        report = SyncReport(version, self._strategy.encoding.label)
        updates: dict[int, Update] = {}
        for idx, named in weights.items():
            if id(named) not in updates:
                schema = self._peers[idx].schema
                updates[id(named)] = self._encode(version, schema, named, commit, group)
                report.dense_bytes += schema.dense_bytes
            with self._moved:
                self._peers[idx].hold("latest", updates[id(named)])
        for update in updates.values():
            update.release()
        report.seconds["encode"] = time.perf_counter() - start
        return report, {idx: updates[id(named)] for idx, named in weights.items()}

    def _encode(
        self,
        version: int,
        schema: WeightSchema,
        named: NamedWeights,
        commit: bool,
        group: str | None,
    ) -> Update:
        slots: list[Slot] = []

        def lend(nbytes: int) -> torch.Tensor:
            slots.append(self._free_slot(nbytes))
            slots[-1].users += 1
            return slots[-1].buffer.tensor

        encoder = self._encoders.get(schema.digest)
        if encoder is None:
            encoder = self._encoders[schema.digest] = self._strategy.encoding.encoder(schema)
        try:
            tensors = [named.tensors[name] for name in schema.names]
            payloads = encoder.encode(tensors, lend)
            chunks = update_chunks(
                version, schema, self._strategy, payloads, named, commit=commit, group=group
            )
        except BaseException:
            for slot in slots:
                slot.users -= 1
            raise
        return Update(version, chunks, slots)

    def _free_slot(self, nbytes: int) -> Slot:
        """A slot that nobody reads; waits for one while there are many.

        A worker that is late keeps up to two slots until it goes on: there may be so many more.
        """
        deadline = time.monotonic() + self.timeout
        with self._moved:
            while True:
                now = time.monotonic()
                limit = _MAX_BUFFERS + 2 * self._late(now)
                slot = self._pool.take(nbytes, limit if now < deadline else None)
                if slot is not None:
                    return slot
                self._moved.wait(_LOOK_SECONDS)

    def _late(self, now: float) -> int:
        """How many workers have had an update for longer than the timeout."""
        peers = self._peers.values()
        return sum(peer.inflight is not None and now - peer.since > self.timeout for peer in peers)

    def _begin(self, peer: Peer) -> Update | None:
        """Make the newest update that ``peer`` should have the one in flight; None if it has to wait."""
        latest = peer.latest
        if not peer.joined or peer.inflight is not None or latest is None:
            return None
        if peer.version is not None and peer.version >= latest.version:
            return None
        peer.hold("inflight", latest)
        peer.since = time.monotonic()
        return latest

    def _catch_up(self, peer: Peer) -> None:
        with self._moved:
            update = self._begin(peer)
        if update is not None:
            self._transmit(peer, update)

    def _transmit_all(self, peers: list[Peer]) -> None:
        jobs = [(peer, peer.inflight) for peer in peers if peer.inflight is not None]
        if self._shared or len(jobs) < 2:
            for peer, update in jobs:
                self._transmit(peer, update)
            return
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(thread_name_prefix="weight_update-send")
        for future in [self._helpers.submit(self._transmit, *job) for job in jobs]:
            future.result()

    def _transmit(self, peer: Peer, update: Update) -> None:
        with peer.sending:
            if peer.inflight is not update:
                return  # the worker was lost, or joins anew and gets the newest version with that
            try:
                for chunk in update.chunks:
                    peer.link.send_chunk(chunk, self.timeout)
            except (TransportError, TimeoutError) as error:
                self._lose(peer, error)
                if isinstance(error, TimeoutError):
                    peer.link.disconnect()

    def _say(self, peer: Peer, *chunks: WeightChunk) -> None:
        with peer.sending:
            for chunk in chunks:
                peer.link.send_chunk(chunk, self.timeout)

    def commit(self, version: int, workers: Iterable[int]) -> None:
        """Let workers apply what they staged."""
        with self._moved:
            for peer in self._peers.values():
                if peer.latest is not None and peer.latest.version == version:
                    peer.latest.settle()
        self._tell(workers, WeightChunk(Kind.COMMIT, {"version": version}))

    def abort(self, version: int, workers: Iterable[int]) -> None:
        """Let workers forget what they staged, and go back to the version before."""
        workers = list(workers)
        self._tell(workers, WeightChunk(Kind.ABORT, {"version": version}))
        with self._moved:
            for idx in workers:
                peer = self._peers[idx]
                peer.staged = None
                if peer.latest is not None and peer.latest.version == version:
                    peer.hold("latest", peer.applied)
                if peer.inflight is not None and peer.inflight.version == version:
                    peer.hold("inflight", None)
            self._moved.notify_all()

    def _tell(self, workers: Iterable[int], chunk: WeightChunk) -> None:
        for idx in workers:
            peer = self._peers[idx]
            if not peer.joined:
                continue
            try:
                self._say(peer, chunk)
            except (TransportError, TimeoutError) as error:
                self._lose(peer, error)
                if isinstance(error, TimeoutError):
                    peer.link.disconnect()

    # -- answers -----------------------------------------------------------------------------------

    def _serve(self, peer: Peer) -> None:
        """Thread of one worker: everything that comes from it."""
        while not self._closed:
            try:
                chunk = peer.link.recv_chunk(None)
                if chunk is not None:
                    self._answer(peer, chunk)
            except (TransportError, FormatError, TimeoutError) as error:
                self._lose(peer, error)
                if isinstance(error, FormatError | TimeoutError):
                    peer.link.disconnect()
                if self._closed or not peer.link.rejoins:
                    return

    def _answer(self, peer: Peer, chunk: WeightChunk) -> None:
        header = chunk.header
        if chunk.kind is Kind.HELLO:
            self._welcome(peer, chunk)
        elif chunk.kind is Kind.STAGED:
            with self._moved:
                peer.staged = header["version"]
                self._moved.notify_all()
        elif chunk.kind in (Kind.APPLIED, Kind.FAILED):
            self._settle(peer, chunk)
            self._catch_up(peer)
        elif chunk.kind is Kind.GOODBYE:
            self._lose(peer, LinkClosedError("it left"))
        else:
            raise FormatError(f"unexpected {chunk.kind.name} frame")

    def _settle(self, peer: Peer, chunk: WeightChunk) -> None:
        version = chunk.header["version"]
        with self._moved:
            update = peer.inflight
            if update is None or update.version != version:
                return
            if chunk.kind is Kind.APPLIED:
                peer.version = peer.reached = version
                peer.apply_seconds = float(chunk.header["apply_seconds"])
                peer.stall_seconds = float(chunk.header["stall_seconds"])
                peer.hold("applied", update)
                self.version = version if self.version is None else max(version, self.version)
            else:
                for slot in update.slots if self._shared else ():
                    slot.abandoned = True  # it may have failed after the switch, and read this memory now
                text = chunk.header["traceback"] or chunk.header["error"]
                peer.failures[version] = WorkerError(f"{chunk.header['error']}\n\n{text}")
                if peer.latest is update:
                    peer.hold("latest", peer.applied)
            peer.hold("inflight", None)
            self._moved.notify_all()

    def _lose(self, peer: Peer, error: Exception) -> None:
        with self._moved:
            if peer.joined or peer.lost is None:
                peer.lost = error
            peer.let_go()
            self._moved.notify_all()

    # -- waiting -----------------------------------------------------------------------------------

    def wait_staged(self, version: int, workers: Iterable[int], timeout: float) -> dict[int, Exception]:
        """Wait until workers have ``version`` staged; the errors of those that do not."""

        def settled(peer: Peer) -> bool:
            return peer.staged == version or not peer.joined or version in peer.failures

        return self._wait(version, workers, timeout, settled, lambda peer: peer.staged == version)

    def wait_applied(self, version: int, workers: Iterable[int], timeout: float) -> dict[int, Exception]:
        """Wait until workers have applied ``version`` or a newer one; the errors of those that did not."""

        def has_it(peer: Peer) -> bool:
            return peer.reached >= version

        def settled(peer: Peer) -> bool:
            return has_it(peer) or not peer.joined or peer.failure(version) is not None

        return self._wait(version, workers, timeout, settled, has_it)

    def _wait(
        self,
        version: int,
        workers: Iterable[int],
        timeout: float,
        settled: Callable[[Peer], bool],
        good: Callable[[Peer], bool],
    ) -> dict[int, Exception]:
        peers = [self._peers[idx] for idx in workers]
        with self._moved:
            self._moved.wait_for(lambda: all(map(settled, peers)), timeout)
            failures: dict[int, Exception] = {}
            for peer in peers:
                if good(peer):
                    continue
                if (error := peer.failure(version)) is not None:
                    failures[peer.idx] = error
                elif not peer.joined:
                    failures[peer.idx] = peer.lost or LinkClosedError("it is not connected")
                else:
                    failures[peer.idx] = SyncTimeoutError(
                        f"did not apply it within {timeout:g} s: it is stopped, or in hold() or a long "
                        "forward pass; it gets the newest version when it goes on (or raise timeout=)"
                    )
            return failures

    def failures(self, version: int, workers: Iterable[int]) -> dict[int, Exception]:
        """The errors known by now of workers that will not apply ``version``; does not wait."""
        with self._moved:
            found = {}
            for idx in workers:
                peer = self._peers[idx]
                if version in peer.failures:
                    found[idx] = peer.failures[version]
                elif not peer.joined and peer.reached < version:
                    found[idx] = peer.lost or LinkClosedError("it is not connected")
            return found

    def settled(self, version: int, workers: Iterable[int]) -> bool:
        """Whether nothing more is to be waited for."""
        with self._moved:
            return all(
                not peer.joined or peer.reached >= version or peer.failure(version) is not None
                for peer in (self._peers[idx] for idx in workers)
            )

    def fill(self, report: SyncReport, workers: Iterable[int]) -> None:
        """Enter into ``report`` what the workers said."""
        with self._moved:
            for idx in workers:
                peer = self._peers[idx]
                if peer.reached >= report.version:
                    report.apply_seconds[idx] = peer.apply_seconds
                    report.stall_seconds[idx] = peer.stall_seconds
            for encoder in self._encoders.values():
                encoder.committed(report.version)

    def close(self) -> None:
        """Say goodbye, end all threads, free all memory."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        for peer in self._peers.values():
            if peer.joined:
                self._tell([peer.idx], WeightChunk(Kind.GOODBYE, {}))
        for peer in self._peers.values():
            peer.link.close()
        for peer in self._peers.values():
            if peer.thread is not None and peer.thread is not threading.current_thread():
                peer.thread.join(5.0)
        if self._helpers is not None:
            self._helpers.shutdown(wait=False, cancel_futures=True)
        with self._moved:
            for peer in self._peers.values():
                peer.joined = False
                for role in ("latest", "applied", "inflight"):
                    peer.hold(role, None)
            self._encoders.clear()
            self._moved.notify_all()
        self._pool.close()


def _require_schema(schema: WeightSchema, named: NamedWeights) -> None:
    hollow = [name for name, tensor in named.tensors.items() if tensor.is_meta]
    if hollow:
        raise UnsupportedSourceError(f"on the meta device, without values to send: {', '.join(hollow[:10])}")
    if tuple(named.tensors) == schema.names and all(
        tensor.shape == meta.shape and tensor.dtype == meta.dtype and tensor.layout is torch.strided
        for tensor, meta in zip(named.tensors.values(), schema.tensors, strict=True)
    ):
        values = list(named.tensors.values())
        if all(_same_memory(values[a], values[b]) for a, b in schema.ties):
            return
    given = WeightSchema.of(named.tensors)
    problems = [*differences(schema, given, "the weights given"), *untied(schema, given)]
    if problems:
        raise SchemaMismatchError(
            f"the weights given are not those agreed on in connect() ({len(problems)} differences):",
            tuple(problems),
        )


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or memory_identity(a) == memory_identity(b)


def _raise_connect(failures: Mapping[int, Exception], late: list[int], timeout: float) -> None:
    mismatches = [error for error in failures.values() if isinstance(error, SchemaMismatchError)]
    if mismatches:
        problems = tuple(line for error in mismatches for line in error.problems)
        raise SchemaMismatchError(str(mismatches[0]).partition("\n")[0], problems)
    if failures:
        silent = {idx: SyncTimeoutError(f"did not come within {timeout:g} s") for idx in late}
        failures = {**failures, **silent}
        lines = "".join(f"\n  worker {idx}: {error}" for idx, error in sorted(failures.items()))
        raise SyncFailedError(f"workers could not connect:{lines}", failures)
    if late:
        raise SyncTimeoutError(
            f"workers {late} did not connect within {timeout:g} s; have they called connect()?"
        )
