"""The sending end of a scheme: encodes once, serves every worker, and keeps account of who has what."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack

import torch

from weight_update.encodings import DeltaEncoding, Lend
from weight_update.errors import (
    FormatError,
    JoinRefusedError,
    LinkClosedError,
    NotEnoughMemoryError,
    SchemaMismatchError,
    TransportError,
    WorkerError,
)
from weight_update.report import SyncReport
from weight_update.sender.buffers import MIXED, BufferPool, Slot
from weight_update.sender.delivery import Delivery
from weight_update.sender.groups.assignment import Lanes
from weight_update.sender.groups.full import Lane, Staged
from weight_update.sender.peer import Holder, Peer
from weight_update.sender.streams import Streams
from weight_update.sender.workers import Roll
from weight_update.strategy.named_weights import NamedWeights
from weight_update.strategy.strategy import WeightStrategy
from weight_update.transports.base import TransportBackend
from weight_update.wire.frames import Kind, WeightChunk
from weight_update.wire.schema import WeightSchema
from weight_update.wire.updates import Step
from weight_update.wire.verify import require_agreed

__all__ = ["Outcome", "Sender"]

Outcome = tuple[bool, dict[int, Exception]]

_log = logging.getLogger(__name__)
_MAX_UPDATES = 4
_LOOK_SECONDS = 0.2
_PARTING_SECONDS = 5.0
_ADMITTED_SECONDS = 30.0
"""Seconds within which a connection reaches its link once its worker was admitted."""
_REPLACED_KEPT = 1024
"""How many receivers that were replaced are remembered, beside those whose index is in use."""
_ABSENT_SECONDS = 60.0
"""Seconds that a late joiner which was refused, or lost, has to come back on the connection it has."""


class Sender:
    """Sends versions of weights to workers.

    Args:
        links: the sender's end for each worker index.
        schemas: what each worker is to have; workers with equal schemas share the encoding.
        tracked: names of the weights that updates carry, for each worker; None for all of its schema.
        strategy: how weights are read and encoded.
        token: workers must show it to get in.
        timeout: seconds an update may take until all workers have applied it.

    Attributes:
        roll: the workers.
        version: the last one that a worker applied.
        refusals: why the listener refused join requests, for :meth:`connect` to say.
    """

    def __init__(
        self,
        links: Mapping[int, TransportBackend],
        schemas: Mapping[int, WeightSchema],
        tracked: Mapping[int, frozenset[str] | None],
        strategy: WeightStrategy,
        token: str,
        timeout: float,
    ) -> None:
        self.version: int | None = None
        self.timeout = timeout
        self._strategy, self._token = strategy, token
        self.roll = Roll(Peer(idx, link, schemas[idx], tracked[idx]) for idx, link in links.items())
        for peer in self.roll:
            self._screen_at(peer)
        self._lanes = Lanes(self.roll, strategy.encoding, self._borrow)
        self._delivery = Delivery(self.roll.moved, timeout)
        self._streams = Streams(self.roll, self._lanes, strategy, self._free_slot, self._delivery)
        self._numbers = -1
        self.refusals: Iterable[str] = ()
        self._replaced: OrderedDict[str | None, int] = OrderedDict()  # replaced instance: pid of the new one
        self._publishing = threading.Lock()
        self._joining: Mapping[int, NamedWeights] = {}  # weights for whom joins while connect() waits
        first = next(iter(links.values()))
        self._shared = first.shares_memory
        self._pool = BufferPool(first)
        try:
            for schema in {schema.digest: schema for schema in schemas.values()}.values():
                if isinstance(strategy.encoding, DeltaEncoding):
                    strategy.encoding.bootstraps(schema)  # prefixes that match nothing are an error at once
                sizes = Counter(strategy.encoding.whole.payload_sizes(schema))
                if strategy.max_in_flight is not None:
                    sizes = Counter({max(sizes): min(strategy.max_in_flight, sizes.total())})
                for nbytes, count in sizes.items():
                    self._pool.reserve(nbytes, count if strategy.encoding.keeps else 2 * count)
        except BaseException:
            self._pool.close()  # whoever looks at the error keeps no memory with it
            raise
        self._closed = False
        self._pid = os.getpid()

    @property
    def serving(self) -> bool:
        """Whether :meth:`connect` was called, and :meth:`close` was not."""
        return self._numbers >= 0 and not self._closed

    def let_in(self, idx: int, make_link: Callable[[], TransportBackend]) -> TransportBackend:
        """Return the link of a late joiner, which is to have what all others have.

        Raises:
            JoinRefusedError: :meth:`close` was called.
        """
        with self.roll.moved:
            if self._closed:
                raise JoinRefusedError("the sender was shut down")
            if idx not in self.roll:
                like, link = next(iter(self.roll)), make_link()
                peer = self.roll.removed(idx) or Peer(idx, link, like.schema, like.tracked, guest=True)
                peer.link = link
                self._screen_at(peer)
                self.roll.add(peer)
            peer = self.roll[idx]
            peer.admitted = time.monotonic() + _ADMITTED_SECONDS
            if self.serving:
                self._listen_to(peer)
            return peer.link

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
        with self.roll.moved:
            for peer in self.roll:
                peer.lost, peer.failures = None, {}
        deadline = time.monotonic() + timeout
        if self._strategy.max_in_flight is not None:
            for peer in self.roll:
                self._listen_to(peer)
            self.roll.await_none(lambda: self.roll.absent, deadline, alive)
            with self._publishing:
                self._numbers += 1
                report = self._streams.send(self._of_known(weights), Step(self._numbers), self.timeout)
        else:
            with self._publishing:
                weights = self._of_known(weights)
                report = self._stage(weights, weights)
                self._joining = weights
            for peer in self.roll:
                self._delivery.bring_up(peer)
                self._listen_to(peer)
        try:
            self.roll.await_none(lambda: self.roll.unsettled, deadline, alive)
            self.roll.require_all(timeout, self.refusals)
        finally:
            with self._publishing:
                for idx, named in self._of_known(weights).items():
                    if (
                        self.roll[idx].lane is None and not self.roll[idx].guest
                    ):  # it may come later, when these weights have changed
                        kept = named if self._strategy.max_in_flight is None else None
                        self._settle_in(self.roll[idx], self.roll[idx].schema, kept)
                self._joining = {}
            report.dense_bytes = sum(lane.schema.dense_bytes for lane in self._lanes.all())
        self.roll.fill(report, weights)
        return report

    def _listen_to(self, peer: Peer) -> None:
        with self.roll.moved:
            if peer.thread is None:
                name = f"weight_update-peer-{peer.idx}"
                peer.thread = threading.Thread(target=self._serve, args=(peer,), name=name, daemon=True)
                try:
                    peer.thread.start()
                except BaseException:
                    peer.thread = None  # the worker's next attempt to join tries it again
                    raise

    def _screen_at(self, peer: Peer) -> None:
        """Have the link of a worker screen join requests."""
        peer.link.on_join_request = functools.partial(self._screen, peer)

    def _screen(self, peer: Peer, hello: WeightChunk) -> None:
        """Note which receiver an index belongs to from now on.

        A new receiver replaces the one that is connected, if its model fits. A receiver that was replaced and
        joins again by itself is refused.

        Raises:
            JoinRefusedError: the connected worker stays.
        """
        header = hello.header
        who, again = Holder(header.get("instance"), header["pid"]), header.get("again", False)
        if peer.holder == who:
            peer.arrivals += 1
            return
        misfit = None if again else self._misfit(peer, hello)
        with self.roll.moved:
            former = peer.holder if peer.holder and peer.holder.instance != who.instance else None
            successor = self._replaced.get(who.instance, former.pid if former is not None else None)
            if again and successor is not None:
                raise JoinRefusedError(
                    f"worker {peer.idx} (process {who.pid}) was replaced by process {successor}"
                )
            replaces = former is not None and peer.joined and misfit is None
            if misfit is None:
                self._give_index(peer, who, former)
            elif former is not None and peer.joined:
                raise JoinRefusedError(str(misfit).partition("\n")[0], getattr(misfit, "problems", ()))
            peer.arrivals += 1
        if former is not None and replaces:
            _log.info("worker %d: process %d replaces process %d", peer.idx, who.pid, former.pid)

    def _give_index(self, peer: Peer, who: Holder, former: Holder | None) -> None:
        """Let an index belong to ``who``, in the place of ``former``."""
        peer.holder = who
        self._replaced.pop(who.instance, None)
        if former is not None:
            self._replaced[former.instance] = who.pid
        if len(self._replaced) > _REPLACED_KEPT:
            self._replaced.popitem(last=False)
        if former is not None and peer.joined:
            peer.replaced = True

    def _misfit(self, peer: Peer, hello: WeightChunk) -> Exception | None:
        """Return why a receiver cannot be the worker, or None."""
        try:
            self._schema_of(peer, hello)
        except (WorkerError, JoinRefusedError, SchemaMismatchError, FormatError) as error:
            return error
        return None

    def _schema_of(self, peer: Peer, hello: WeightChunk) -> WeightSchema:
        """Return the schema of the model of a receiver that fits.

        Raises:
            JoinRefusedError: it does not know the token.
            WorkerError: it cannot join.
            SchemaMismatchError, FormatError: its model has other weights.
        """
        header = hello.header
        if not hello.shows(self._token):
            raise JoinRefusedError("wrong token")
        if header["error"] is not None:
            raise WorkerError(header["error"])
        if header["schema"] is None:
            return peer.schema
        theirs = WeightSchema.from_header(header["schema"])
        peer.schema.require_same(theirs, f"worker {peer.idx}", more=self._strategy.partial)
        return theirs

    def _welcome(self, peer: Peer, hello: WeightChunk) -> None:
        header = hello.header
        peer.admitted = 0.0
        try:
            theirs = self._schema_of(peer, hello)
            self._screen(peer, hello)
        except (WorkerError, JoinRefusedError, SchemaMismatchError, FormatError) as error:
            self._refuse(peer, error)
            return
        with self.roll.moved:
            peer.let_go()
            peer.lost = None
        lane = self._lane_to_join(peer, peer.schema.for_receiver(theirs))
        welcome = {"schema": lane.schema.to_header(), "strategy": self._strategy.extract_as}
        with peer.sending:  # an update that is just being sent goes to the old link, or not at all
            peer.link.send_chunk(WeightChunk(Kind.WELCOME, {**welcome, **lane.welcome()}), self.timeout)
            with self.roll.moved:
                peer.joined, peer.left, peer.lost, peer.pid = True, False, None, header["pid"]
                peer.replaced = False
                peer.failures.clear()  # it is another process, or has begun anew
        _log.info("worker %d (process %d) joined", peer.idx, peer.pid)
        self._delivery.bring_up(peer)

    def _refuse(self, peer: Peer, error: Exception) -> None:
        """Tell a worker why it is not admitted, unless it told us, and note it for waiting callers."""
        if not isinstance(error, WorkerError):
            header = {
                "reason": str(error).partition("\n")[0],
                "problems": list(getattr(error, "problems", ())),
            }
            self._delivery.say(peer, WeightChunk(Kind.REFUSED, header))
        with self.roll.moved:
            peer.joined, peer.lost = False, error
            self.roll.moved.notify_all()

    def _lane_to_join(self, peer: Peer, wire: WeightSchema) -> Lane:
        """The lane for a joining worker whose weights best travel as ``wire``."""
        with self._publishing:
            self._lanes.join(peer, wire)
            if peer.lane is None:
                first = next(iter(self._joining.values()), None) if peer.guest else None
                self._settle_in(peer, wire, self._joining.get(peer.idx, first))
            assert peer.lane is not None
            return peer.lane

    def _settle_in(self, peer: Peer, wire: WeightSchema, named: NamedWeights | None) -> None:
        self._lanes.settle_in(peer, wire, self._numbers, named)
        with self.roll.moved:
            self._pool.trim(self._update_bytes(wire))

    def _update_bytes(self, schema: WeightSchema) -> int:
        """Size of all payloads of an update that carries all weights."""
        return max(schema.nbytes, sum(self._strategy.encoding.whole.payload_sizes(schema)))

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
            self._lanes.dismiss_guests()
            weights = self._of_known(weights)
            with self.roll.moved:
                for idx in weights:
                    self.roll[idx].forget_old_failures()
            if self._strategy.max_in_flight is not None:
                self._numbers += 1
                step = Step(self._numbers, commit=commit, group=group)
                return self._streams.send(weights, step, self.timeout)
            report = self._stage(weights, weights, commit=commit, group=group)
            start = time.perf_counter()
            sent = self._delivery.bring_up_all([self.roll[idx] for idx in weights])
            report.seconds["send"] = time.perf_counter() - start
            chunks = [chunk for shipment in sent for chunk in shipment.chunks]
            if self._shared:
                chunks = list({id(chunk.payload): chunk for chunk in chunks}.values())
            report.wire_bytes = sum(chunk.payload_bytes for chunk in chunks)
            return report

    def continue_from(self, version: int) -> None:
        """Give the next update a number above ``version``."""
        with self._publishing:
            self._numbers = max(self._numbers, version)

    def _of_known(self, weights: Mapping[int, NamedWeights]) -> Mapping[int, NamedWeights]:
        """Return ``weights`` without those for late joiners that were forgotten meanwhile."""
        if all(idx in self.roll for idx in weights):
            return weights
        return {idx: named for idx, named in weights.items() if idx in self.roll}

    def _stage(
        self,
        weights: Mapping[int, NamedWeights],
        workers: Iterable[int],
        commit: bool = True,
        group: str | None = None,
    ) -> SyncReport:
        """Encode a new version for ``workers`` and, unless it waits for COMMIT, settle it."""
        start = time.perf_counter()
        self._require_all(weights)
        self._numbers += 1
        report = SyncReport(self._numbers, self._strategy.encoding.label)
        kinds = self._lanes.kinds(
            weights, workers, apart=not commit
        )  # what may be aborted brings no lanes together
        lanes: list[Lane] = []
        staged: list[Staged] = []
        try:
            for peers in kinds:
                self._await_room()
                named = weights[peers[0].idx]
                lanes.append(self._lanes.for_one_kind(peers))
                step = Step.of(self._numbers, named.extra, commit=commit, group=group)
                holders = [peer.has for peer in peers if peer.has is not None]
                staged.append(lanes[-1].stage(step, named.tensors, holders))
        except BaseException:
            self._lanes.abandon(lanes)
            raise
        for peers, lane in zip(kinds, lanes, strict=True):
            lane.family = (self._numbers, id(weights[peers[0].idx]))
            self._lanes.move(peers, lane)
            if commit:
                lane.settle()
        _enter(report, lanes, staged)
        if lanes:  # else the first workers are yet to come, and forked ones still hold what would be freed
            with self.roll.moved:
                self._pool.trim(max(self._update_bytes(lane.schema) for lane in lanes))
        report.seconds["encode"] = time.perf_counter() - start
        return report

    def _require_all(self, weights: Mapping[int, NamedWeights]) -> None:
        """Check weights to be sent, once for workers that are alike.

        Raises:
            SchemaMismatchError: they are not those agreed on.
        """
        alike: dict[tuple[int | bool, ...], int] = {}
        for idx, named in weights.items():
            peer = self.roll[idx]
            alike.setdefault((id(named), id(peer.schema), id(peer.tracked), peer.lane is None), idx)
        for idx in alike.values():
            self._require(self.roll[idx], weights[idx])

    def _require(self, peer: Peer, named: NamedWeights) -> None:
        """Check weights to be sent; those that updates do not carry are needed the first time only."""
        schema, more = peer.schema, self._strategy.partial
        if peer.tracked is not None and peer.lane is not None:
            known = [
                meta for meta in schema.tensors if meta.name in peer.tracked or meta.name in named.tensors
            ]
            schema = WeightSchema(tuple(known), schema.nbytes)
        require_agreed(schema, named.tensors, more=more)

    def _borrow(self, slots: list[Slot]) -> Lend:
        def lend(nbytes: int) -> torch.Tensor:
            slot = self._free_slot(nbytes)
            slots.append(slot)
            return slot.buffer.tensor

        return lend

    def _free_slot(self, nbytes: int) -> Slot:
        """A slot that nobody reads, with one user; waits for one while memory is short."""
        deadline = time.monotonic() + self.timeout
        with self.roll.moved:
            while True:
                slot = self._pool.take(nbytes)
                if slot is not None:
                    slot.users += 1
                    return slot
                if time.monotonic() > deadline:
                    raise NotEnoughMemoryError(
                        f"no memory for {nbytes / 1e6:.1f} MB, and workers did not let go of any in time"
                    )
                self.roll.moved.wait(_LOOK_SECONDS)

    def _await_room(self) -> None:
        """Wait while so many updates are in use that a further one would cost too much memory.

        A worker that is late keeps up to two until it goes on: there may be so many more.
        """
        deadline = time.monotonic() + self.timeout
        with self.roll.moved:
            while time.monotonic() < deadline:
                lanes = self._lanes.all()
                held = [one for lane in lanes for one in lane.held]
                held += [one for peer in self.roll for one in (peer.applied, peer.inflight) if one]
                limit = _MAX_UPDATES + 2 * self._late() + 2 * (len(lanes) - 1)
                if len({id(one.content) for one in held}) < limit:
                    return
                self.roll.moved.wait(_LOOK_SECONDS)

    def _late(self) -> int:
        """How many workers have had an update for longer than the timeout."""
        now = time.monotonic()
        peers = self.roll
        return sum(peer.inflight is not None and now - peer.since > self.timeout for peer in peers)

    # -- waiting -----------------------------------------------------------------------------------

    @property
    def workers(self) -> tuple[int, ...]:
        """Indices of all workers; see :attr:`~weight_update.sender.workers.Roll.workers`."""
        return self.roll.workers

    @property
    def worker_versions(self) -> dict[int, int | None]:
        """What each worker has applied; None for one that is not connected."""
        return {peer.idx: peer.version for peer in self.roll.present}

    def members(self, workers: Sequence[int]) -> Sequence[object]:
        """Return what has to be held for the outcome of an update to these workers to be known."""
        return self.roll.known(workers)

    def wait(self, report: SyncReport, workers: Sequence[int], timeout: float | None) -> dict[int, Exception]:
        """Wait until workers have applied an update or a newer one; the errors of those that did not.

        Args:
            report: of the update; what workers say of it is entered there.
            workers: indices.
            timeout: seconds; None takes the sender's, counted from when all was sent.
        """
        limit = self.timeout if timeout is None else timeout
        failures = self.roll.wait_applied(report.version, workers, limit, patient=timeout is None)
        self.roll.fill(report, workers)
        return failures

    def wait_staged(self, version: int, workers: Sequence[int]) -> dict[int, Exception]:
        """Wait until workers have ``version`` staged; the errors of those that do not."""
        return self.roll.wait_staged(version, workers, self.timeout)

    def settled(self, version: int, workers: Sequence[int]) -> bool:
        """Whether nothing more is to be waited for."""
        return self.roll.settled(version, workers)

    def failures(self, version: int, workers: Sequence[int]) -> dict[int, Exception]:
        """The errors known by now of workers that will not apply ``version``; does not wait."""
        return self.roll.failures(version, workers)

    def outcomes(self, updates: Sequence[tuple[int, Sequence[int]]]) -> list[Outcome]:
        """Of each update, a version and its workers: whether it is settled, and the errors known by now."""
        # whether it is settled is looked at first: then no more errors come
        settled = [self.settled(version, workers) for version, workers in updates]
        failures = [self.failures(version, workers) for version, workers in updates]
        return list(zip(settled, failures, strict=True))

    def one(self, weights: Mapping[int, NamedWeights]) -> NamedWeights | None:
        """What a worker is to have, whole."""
        return next(iter(weights.values()))

    def commit(self, version: int, workers: Iterable[int]) -> None:
        """Let workers apply what they staged."""
        with self._publishing:
            for lane in self._lanes.all():
                if lane.pending == version:
                    lane.settle()
        peers = self.roll.known(workers)
        with self.roll.moved:
            told = [p for p in peers if p.inflight is not None and p.inflight.version == version]
        self._delivery.tell(told, WeightChunk(Kind.COMMIT, {"version": version}))
        self._delivery.bring_up_all([peer for peer in peers if peer not in told])

    def abort(self, version: int, workers: Iterable[int]) -> None:
        """Let workers forget what they staged, and go back to the version before."""
        peers = self.roll.known(workers)
        with self._publishing:
            for lane in self._lanes.all():
                if lane.pending == version:
                    lane.drop()
        with self.roll.moved:
            for peer in peers:
                peer.staged = None
                if peer.inflight is not None and peer.inflight.version == version:
                    peer.hold("inflight", None)  # first: what is not sent yet is then not sent at all
            self.roll.moved.notify_all()
        self._delivery.tell(peers, WeightChunk(Kind.ABORT, {"version": version}))

    # -- answers -----------------------------------------------------------------------------------

    def _serve(self, peer: Peer) -> None:
        """Thread of one worker: everything that comes from it."""
        ended = False
        while not self._closed and not ended:
            arrivals: int | None = peer.arrivals
            try:
                chunk = peer.link.recv_chunk(_ABSENT_SECONDS if peer.guest else None)
                arrivals = None
                if chunk is not None:
                    self._answer(peer, chunk)
                    continue
            except (TransportError, FormatError, TimeoutError, NotEnoughMemoryError) as error:
                self._delivery.lose(peer, error, arrivals)
                ended = not peer.link.rejoins
            except Exception as error:  # noqa: BLE001 - whatever it is, whoever waits must hear of it
                _log.exception("the link to worker %d ended", peer.idx)
                self._delivery.lose(peer, error)
                ended = True
            ended = self._forget(peer) or ended

    def _forget(self, peer: Peer) -> bool:
        """Forget a late joiner, unless it is connected or about to be; return whether it is forgotten."""
        if peer.joined or not peer.guest or self._closed:
            return False
        with self._publishing, self.roll.moved:
            if peer.joined or time.monotonic() < peer.admitted:
                return False
            self._lanes.leave(peer)
            self.roll.remove(peer)
            peer.thread = peer.former = None
            link = peer.link
        link.close()
        return True

    def _answer(self, peer: Peer, chunk: WeightChunk) -> None:
        header = chunk.header
        if chunk.kind is Kind.HELLO:
            self._welcome(peer, chunk)
        elif chunk.kind is Kind.STAGED:
            with self.roll.moved:
                peer.staged = header["version"]
                self._arrived(peer, header["version"])
                self.roll.moved.notify_all()
        elif chunk.kind is Kind.TAKEN:
            with self.roll.moved:
                if peer.pipeline is not None and peer.pipeline.step.version == header["version"]:
                    peer.pipeline.taken(peer, header["index"])
        elif chunk.kind in (Kind.APPLIED, Kind.FAILED):
            self._settle(peer, chunk)
            self._delivery.bring_up(peer)
        elif chunk.kind is Kind.BEHIND:
            with self.roll.moved:
                peer.has = None  # whole weights, then
                if peer.inflight is not None and peer.inflight.version == header["version"]:
                    peer.hold("inflight", None)
            self._delivery.bring_up(peer)
        elif chunk.kind is Kind.GOODBYE:
            peer.left = True
            self._delivery.lose(peer, LinkClosedError("it left"))
        else:
            raise FormatError(f"unexpected {chunk.kind.name} frame")

    def _arrived(self, peer: Peer, version: int) -> None:
        """A worker has read all of a version, or will read no more of it."""
        if peer.pipeline is not None and peer.pipeline.step.version == version:
            peer.pipeline.leave(peer, reading=False)

    def _settle(self, peer: Peer, chunk: WeightChunk) -> None:
        version = chunk.header["version"]
        with self.roll.moved:
            self._arrived(peer, version)
            update = peer.inflight
            if update is None or update.version != version:
                return
            if chunk.kind is Kind.APPLIED:
                peer.has, peer.reached = update.content, version
                peer.apply_seconds = float(chunk.header["apply_seconds"])
                peer.stall_seconds = float(chunk.header["stall_seconds"])
                peer.hold("applied", None if self._strategy.encoding.keeps else update)
                self.version = version if self.version is None else max(version, self.version)
            else:
                for slot in update.slots if self._shared else ():
                    slot.abandoned = True  # it may have failed after the switch, and read this memory now
                text = chunk.header["traceback"] or chunk.header["error"]
                if not chunk.header["kept"] and peer.has is not None:
                    peer.has = MIXED
                peer.failures[version] = WorkerError(f"{chunk.header['error']}\n\n{text}")
            peer.hold("inflight", None)
            self.roll.moved.notify_all()

    def close(self) -> None:
        """Say goodbye, end all threads, free all memory."""
        if self._closed or os.getpid() != self._pid:
            return
        with ExitStack() as rest:  # whatever one step raises, all are taken; the last entered is the first
            rest.callback(self._free_memory)
            rest.callback(self._end_threads)
            rest.callback(self._close_links)
            rest.callback(self._delivery.close)
            rest.callback(self._say_goodbye)
            self._recall()

    def _say_goodbye(self) -> None:
        with self.roll.moved:
            self._closed = True  # no late joiner is admitted from now on
        self._delivery.tell(self.roll, WeightChunk(Kind.GOODBYE, {}))

    def _close_links(self) -> None:
        with ExitStack() as rest:
            for peer in self.roll:
                rest.callback(peer.link.close)

    def _end_threads(self) -> None:
        for peer in self.roll:
            if peer.thread is not None and peer.thread is not threading.current_thread():
                peer.thread.join(5.0)

    def _free_memory(self) -> None:
        with self.roll.moved:
            for lane in self._lanes.all():
                lane.close()
            for peer in self.roll:
                peer.joined = False
                peer.hold("applied", None)
                peer.hold("inflight", None)
                peer.lane = None
            self.roll.moved.notify_all()
        self._pool.close()

    def _recall(self) -> None:
        """Let workers take their weights out of memory that ends with this process."""
        borrowers = [peer for peer in self.roll if peer.joined and peer.link.lends]
        self._delivery.tell(borrowers, WeightChunk(Kind.GOODBYE, {}))
        with self.roll.moved:
            self.roll.moved.wait_for(lambda: not any(peer.joined for peer in borrowers), _PARTING_SECONDS)


def _enter(report: SyncReport, lanes: list[Lane], staged: list[Staged]) -> None:
    """Enter into ``report`` what was staged."""
    if not staged:
        return
    report.dense_bytes = sum(lane.schema.dense_bytes for lane in lanes)
    report.encoding = "+".join(sorted({one.label for one in staged}))
    report.compression = "+".join(sorted({one.compression for one in staged} - {""}))
    total = sum(one.total for one in staged)
    report.changed_fraction = sum(one.changed for one in staged) / total if total else 0.0
