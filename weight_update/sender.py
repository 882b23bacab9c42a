"""The sending end of a scheme: encodes once, serves every worker, and keeps account of who has what."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from weight_update.chunks import Kind, WeightChunk, WeightSchema, differences, memory_identity, untied
from weight_update.encodings import Encoder
from weight_update.errors import (
    FormatError,
    JoinRefusedError,
    LinkClosedError,
    NotEnoughMemoryError,
    SchemaMismatchError,
    SyncFailedError,
    SyncTimeoutError,
    TransportError,
    UnsupportedSourceError,
    WorkerError,
)
from weight_update.report import SyncReport
from weight_update.strategy import NamedWeights, WeightStrategy
from weight_update.transports.base import Buffer, TransportBackend, update_chunks

__all__ = ["SendHandle", "Sender"]

_MAX_BUFFERS = 4
_MAX_FAILURES = 8
_LOOK_SECONDS = 0.2


class _Slot:
    """A buffer and how many updates in use lie in it."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.users = 0
        self.abandoned = False


class _Update:
    """One version, encoded, and the slots it lies in."""

    def __init__(self, version: int, chunks: list[WeightChunk], slots: list[_Slot]) -> None:
        self.version, self.chunks, self.slots = version, chunks, slots

    @property
    def payload_bytes(self) -> int:
        return sum(chunk.payload_bytes for chunk in self.chunks)

    def settle(self) -> None:
        """It is committed: a worker that joins from now on applies it at once, and on its own."""
        self.chunks = [
            replace(chunk, header={**chunk.header, "commit": True, "group": None}) for chunk in self.chunks
        ]

    def retain(self) -> _Update:
        for slot in self.slots:
            slot.users += 1
        return self

    def release(self) -> None:
        for slot in self.slots:
            slot.users -= 1


class _Pool:
    """Buffers for payloads, reused as soon as nobody reads them."""

    def __init__(self, link: TransportBackend) -> None:
        self._link = link
        self._slots: list[_Slot] = []

    def reserve(self, nbytes: int) -> None:
        """Make sure that two buffers of this size exist."""
        while sum(slot.buffer.tensor.numel() == nbytes for slot in self._slots) < 2:
            self._slots.append(_Slot(self._link.allocate(nbytes)))

    def take(self, nbytes: int, limit: int | None) -> _Slot | None:
        """A free buffer, or a new one if there are fewer than ``limit``, or None.

        Raises:
            NotEnoughMemoryError: there is none, ``limit`` is None, and a new one does not fit.
        """
        self._drop([slot for slot in self._slots if slot.abandoned and slot.users == 0])
        same = [slot for slot in self._slots if slot.buffer.tensor.numel() == nbytes and not slot.abandoned]
        free = [slot for slot in same if slot.users == 0]
        if free:
            if limit is not None and len(same) > limit:
                self._drop(free[1:])
            return free[0]
        if limit is not None and len(same) >= limit:
            return None
        try:
            self._slots.append(_Slot(self._link.allocate(nbytes)))
        except NotEnoughMemoryError:
            if limit is None or not same:
                raise
            return None  # one of them will be free soon
        return self._slots[-1]

    def _drop(self, slots: list[_Slot]) -> None:
        for slot in slots:
            self._slots.remove(slot)
            slot.buffer.close()

    def close(self) -> None:
        for slot in self._slots:
            slot.buffer.close()
        self._slots.clear()


class _Peer:
    """What the sender knows of one worker."""

    def __init__(self, idx: int, link: TransportBackend, schema: WeightSchema) -> None:
        self.idx, self.link, self.schema = idx, link, schema
        self.joined = False
        self.pid = 0
        self.version: int | None = None
        self.reached = -1  # the newest version it ever applied; not forgotten when it leaves
        self.staged: int | None = None
        self.latest: _Update | None = None  # what it should have
        self.applied: _Update | None = None  # what it has; where memory is shared, what it reads
        self.inflight: _Update | None = None
        self.since = 0.0
        self.lost: Exception | None = None
        self.failures: dict[int, Exception] = {}
        self.apply_seconds = 0.0
        self.stall_seconds = 0.0
        self.sending = threading.Lock()
        self.thread: threading.Thread | None = None

    def trouble(self) -> Exception | None:
        """What keeps it from having the weights: its own error, else how it was lost."""
        return next(iter(self.failures.values()), self.lost)

    def failure(self, version: int) -> Exception | None:
        """Why it has neither ``version`` nor a newer one in its place, and will not get one by itself."""
        if version in self.failures:
            return self.failures[version]
        pending = self.latest is not None and self.latest.version >= version
        newer = [error for number, error in self.failures.items() if number > version]
        return newer[-1] if newer and not pending else None

    def forget_old_failures(self) -> None:
        """Keep the last few: whoever sends without waiting asks for them later."""
        for version in list(self.failures)[:-_MAX_FAILURES]:
            del self.failures[version]

    def hold(self, role: str, update: _Update | None) -> None:
        """Set ``latest``, ``applied`` or ``inflight``, keeping count of who uses which memory."""
        old: _Update | None = self.__dict__[role]
        self.__dict__[role] = update.retain() if update is not None else None
        if old is not None:
            old.release()

    def let_go(self) -> None:
        """Stop counting on its answer. If it may still read our memory, never write there again."""
        if self.link.shares_memory and _may_run(self.pid):
            for update in (self.applied, self.inflight):
                for slot in update.slots if update is not None else ():
                    slot.abandoned = True
        self.joined, self.version, self.staged = False, None, None
        self.hold("inflight", None)
        self.hold("applied", None)


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
        self._peers = {idx: _Peer(idx, link, schemas[idx]) for idx, link in links.items()}
        self._numbers = -1
        self._moved = threading.Condition(threading.RLock())
        self._publishing = threading.Lock()
        first = next(iter(links.values()))
        self._shared = first.shares_memory
        self._pool = _Pool(first)
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

    def _unsettled(self) -> list[_Peer]:
        return [
            peer
            for peer in self._peers.values()
            if peer.trouble() is None and (not peer.joined or peer.version is None)
        ]

    def _welcome(self, peer: _Peer, hello: WeightChunk) -> None:
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
    ) -> SendHandle:
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
            return SendHandle(self, report, tuple(weights))

    def _publish(
        self, weights: Mapping[int, NamedWeights], *, commit: bool, group: str | None
    ) -> tuple[SyncReport, dict[int, _Update]]:
        start = time.perf_counter()
        for idx, named in weights.items():
            _require_schema(self._peers[idx].schema, named)
        self._numbers += 1
        version = self._numbers
        report = SyncReport(version, self._strategy.encoding.label)
        updates: dict[int, _Update] = {}
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
    ) -> _Update:
        slots: list[_Slot] = []

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
        return _Update(version, chunks, slots)

    def _free_slot(self, nbytes: int) -> _Slot:
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

    def _begin(self, peer: _Peer) -> _Update | None:
        """Make the newest update that ``peer`` should have the one in flight; None if it has to wait."""
        latest = peer.latest
        if not peer.joined or peer.inflight is not None or latest is None:
            return None
        if peer.version is not None and peer.version >= latest.version:
            return None
        peer.hold("inflight", latest)
        peer.since = time.monotonic()
        return latest

    def _catch_up(self, peer: _Peer) -> None:
        with self._moved:
            update = self._begin(peer)
        if update is not None:
            self._transmit(peer, update)

    def _transmit_all(self, peers: list[_Peer]) -> None:
        jobs = [(peer, peer.inflight) for peer in peers if peer.inflight is not None]
        if self._shared or len(jobs) < 2:
            for peer, update in jobs:
                self._transmit(peer, update)
            return
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(thread_name_prefix="weight_update-send")
        for future in [self._helpers.submit(self._transmit, *job) for job in jobs]:
            future.result()

    def _transmit(self, peer: _Peer, update: _Update) -> None:
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

    def _say(self, peer: _Peer, *chunks: WeightChunk) -> None:
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

    def _serve(self, peer: _Peer) -> None:
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

    def _answer(self, peer: _Peer, chunk: WeightChunk) -> None:
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

    def _settle(self, peer: _Peer, chunk: WeightChunk) -> None:
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

    def _lose(self, peer: _Peer, error: Exception) -> None:
        with self._moved:
            if peer.joined or peer.lost is None:
                peer.lost = error
            peer.let_go()
            self._moved.notify_all()

    # -- waiting -----------------------------------------------------------------------------------

    def wait_staged(self, version: int, workers: Iterable[int], timeout: float) -> dict[int, Exception]:
        """Wait until workers have ``version`` staged; the errors of those that do not."""

        def settled(peer: _Peer) -> bool:
            return peer.staged == version or not peer.joined or version in peer.failures

        return self._wait(version, workers, timeout, settled, lambda peer: peer.staged == version)

    def wait_applied(self, version: int, workers: Iterable[int], timeout: float) -> dict[int, Exception]:
        """Wait until workers have applied ``version`` or a newer one; the errors of those that did not."""

        def has_it(peer: _Peer) -> bool:
            return peer.reached >= version

        def settled(peer: _Peer) -> bool:
            return has_it(peer) or not peer.joined or peer.failure(version) is not None

        return self._wait(version, workers, timeout, settled, has_it)

    def _wait(
        self,
        version: int,
        workers: Iterable[int],
        timeout: float,
        settled: Callable[[_Peer], bool],
        good: Callable[[_Peer], bool],
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


class SendHandle:
    """An update on its way.

    Attributes:
        version: its number.
    """

    def __init__(self, sender: Sender, report: SyncReport, workers: tuple[int, ...]) -> None:
        self._sender, self._report, self._workers = sender, report, workers
        self.version = report.version

    def __repr__(self) -> str:
        return f"SendHandle(version={self.version}, workers={list(self._workers)}, done={self.done()})"

    def done(self) -> bool:
        """Whether every worker has applied it (or a newer one), or failed."""
        return self._sender.settled(self.version, self._workers)

    def wait(self, timeout: float | None = None) -> SyncReport:
        """Wait until every worker has applied this update or a newer one.

        Args:
            timeout: seconds; None takes the scheme's.

        Raises:
            SyncFailedError: workers failed, died or were late; it names them. All others have it.
        """
        limit = self._sender.timeout if timeout is None else timeout
        start = time.perf_counter()
        failures = self._sender.wait_applied(self.version, self._workers, limit)
        self._report.seconds["ack"] = time.perf_counter() - start
        self._sender.fill(self._report, self._workers)
        if failures:
            raise failed(self.version, failures, self._report)
        return self._report

    def wait_staged(self) -> dict[int, Exception]:
        """Wait until the workers have staged it; the errors of those that have not."""
        return self._sender.wait_staged(self.version, self._workers, self._sender.timeout)

    def commit(self) -> None:
        """Let the workers apply what they staged."""
        self._sender.commit(self.version, self._workers)

    def abort(self) -> None:
        """Let the workers forget what they staged."""
        self._sender.abort(self.version, self._workers)

    def failures(self) -> dict[int, Exception]:
        """The errors known by now, by worker; does not wait."""
        return self._sender.failures(self.version, self._workers)

    @property
    def report(self) -> SyncReport:
        """The report as far as it is known."""
        return self._report


def failed(version: int, failures: Mapping[int, Exception], report: SyncReport) -> SyncFailedError:
    """The error for an update that some workers did not take."""
    lines = "".join(f"\n  worker {idx}: {error}" for idx, error in sorted(failures.items()))
    return SyncFailedError(f"version {version} was not applied by:{lines}", failures, report)


def _may_run(pid: int) -> bool:
    """Whether a process of this machine may still execute; zombies do not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


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
