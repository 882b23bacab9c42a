"""The sending side of a scheme: reads weights from their sources, and hands them to the sender."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from tensordict import TensorDictBase

from weight_update.errors import (
    JoinRefusedError,
    LifecycleError,
    NothingToSendError,
    SyncFailedError,
    SyncTimeoutError,
    UnknownWorkerError,
    UnsupportedSourceError,
    WeightSyncError,
    WorkerError,
    close_all,
)
from weight_update.report import SyncReport
from weight_update.schemes.collector import model_named
from weight_update.schemes.sources import Sources
from weight_update.sender.handle import NESTED, SendHandle, failed
from weight_update.sender.joining import WorkerAlive, liveness
from weight_update.sender.observers import Observers
from weight_update.sender.sender import Sender
from weight_update.sender.workers import NOBODY
from weight_update.sharded.gathering import GatherFollower, Gathering, GatherLeader
from weight_update.sharded.ranks import Ranks
from weight_update.sharded.senders import Follower, Leader
from weight_update.strategy.named_weights import NamedWeights
from weight_update.strategy.repeated import RepeatedRead
from weight_update.strategy.strategy import GatherShards, WeightStrategy
from weight_update.text import brief
from weight_update.transports.base import TransportBackend
from weight_update.transports.rate_limit import Refusals
from weight_update.wire.fixed import MANY
from weight_update.wire.schema import WeightSchema

_REMEMBERED = 64
"""Number of updates of ``sync=False`` that nobody waits for and whose errors are still reported."""
SHUT_DOWN = "this scheme was shut down; make a new scheme"
_T = TypeVar("_T")
AnySender = Sender | Follower
_Surveyed = Mapping[int, tuple[NamedWeights, NamedWeights | None]]
_Unchecked = tuple[SendHandle, frozenset[tuple[int, str]]]  # with the errors that were raised, by worker


class SenderListener(Protocol):
    """A listener that admits workers while the sender lives.

    Attributes:
        refusals: reasons why the last join requests were refused.
    """

    refusals: Refusals

    def start(self) -> None:
        """Begin to listen."""

    def close(self) -> None:
        """Stop listening and free everything."""


class _SourceReader:
    """Reads the weights for each worker from its source.

    Late joiners have the source of the first worker, because they are admitted only where all workers share
    one; see :attr:`Sources.common`.
    """

    def __init__(self, sources: Sources, strategy: WeightStrategy) -> None:
        self.gathering: Gathering | None = None  # of a sharded trainer
        self._sources, self._strategy = sources, strategy
        self._first, self._nobody = next(iter(sources.by_worker)), sources.nobody
        self._chosen: dict[int, frozenset[str] | None] = {}  # names that the strategy selects, by worker
        self._repeated: dict[int, RepeatedRead] = {}  # by the position of a source of many tensors in a read

    def survey(self) -> _Surveyed:
        """Return the weights that each worker is to have, and those that updates carry (None for all).

        Workers that get the same weights share one object.

        Raises:
            ValueError: the strategy selects nothing.
            NothingToSendError, UnsupportedSourceError: as :meth:`read`.
        """
        strategy = self._strategy
        sources = self._sources_of(None, sorted(self._sources.by_worker))
        found: dict[int, tuple[NamedWeights, NamedWeights | None]] = {}
        chosen: dict[int, frozenset[str] | None] = {}
        for key, source in {id(source): source for source in sources.values()}.items():
            names = chosen[key] = strategy.chosen(source)
            tracked = self._outgoing(source, names)
            one = names is None or strategy.partial
            found[key] = (tracked, None) if one else (self._outgoing(source), tracked)
        self._chosen = {idx: chosen[id(source)] for idx, source in sources.items()}
        return {idx: found[id(source)] for idx, source in sources.items()}

    def read(self, weights: Any, workers: Sequence[int], first: bool) -> dict[int, NamedWeights]:
        """Return the weights for each of ``workers``; workers that get the same weights share one object.

        ``first`` reads all weights that workers are to have, not only those that updates carry.

        Raises:
            NothingToSendError: no weights were given and there is no source.
            UnsupportedSourceError: the weights are of a type that cannot be read.
        """
        found = self._sources_of(weights, workers)
        everything = first and not self._strategy.partial
        named: dict[int, NamedWeights] = {}
        for idx, source in found.items():
            if id(source) not in named:
                chosen = None if everything else self._chosen.get(idx, self._chosen.get(self._first))
                place = len(named)
                read = named[id(source)] = self._outgoing(source, chosen, self._repeated.get(place))
                if place not in self._repeated and len(read.tensors) >= MANY:
                    self._repeated[place] = RepeatedRead(self._strategy)
        self._repeated = {place: one for place, one in self._repeated.items() if place < len(named)}
        return {idx: named[id(source)] for idx, source in found.items()}

    def _sources_of(self, weights: Any, workers: Sequence[int]) -> dict[int, Any]:
        by_worker, device_map = self._sources.by_worker, self._sources.device_map
        per_worker = _is_per_worker(weights)
        if per_worker and (lacking := [idx for idx in workers if idx not in weights]):
            whom = "workers that join later" if lacking == [NOBODY] else f"workers {lacking}"
            raise UnknownWorkerError(f"no weights for {whom}; weights are given for {sorted(weights)}")
        found: dict[int, Any] = {}
        for idx in workers:
            source = weights[idx] if per_worker else weights
            if source is None:
                source = by_worker[idx if idx in by_worker else self._first]
            if source is None:
                raise NothingToSendError(
                    "send() without weights needs a model: give init_on_sender one, or give send() weights"
                )
            found[idx] = source
        if device_map is not None:
            found = {idx: device_map(idx, source) for idx, source in found.items()}
        if self.gathering is not None:
            self.gathering.begin()
        return found

    def _outgoing(
        self, source: Any, chosen: frozenset[str] | None = None, repeated: RepeatedRead | None = None
    ) -> NamedWeights:
        if self.gathering is not None:
            return self.gathering.read(self._strategy, source, chosen)
        named = (repeated or self._strategy).outgoing(source, chosen)
        if named.sharded:
            raise UnsupportedSourceError(
                "these weights are sharded (DTensor): give init_on_sender a sharded model on every rank, or "
                "WeightStrategy(gather=GatherShards())"
            )
        return named

    def select(self, worker_ids: Any, weights: Any, present: Sequence[int]) -> list[int]:
        """Return the worker indices that the arguments of ``send`` mean, of those that are ``present``.

        ``NOBODY`` is among them if the sender has it, unless weights are given for each worker.

        Raises:
            UnknownWorkerError: no worker has one of the indices or devices.
        """
        known = [*present]
        per_worker = _is_per_worker(weights)
        if worker_ids is None:
            chosen = sorted(weights) if per_worker else known
        else:
            items = worker_ids if isinstance(worker_ids, (list, tuple, set, range)) else [worker_ids]
            chosen = [worker for item in items for worker in self._workers_of(item)]
        if not chosen and not self._nobody:
            raise UnknownWorkerError(f"worker_ids={worker_ids!r} names no worker (known workers: {known})")
        if unknown := [i for i in chosen if i not in known]:
            raise UnknownWorkerError(
                f"unknown workers: {unknown} (known workers: {known}; a late joiner is known only while it "
                "is connected)"
            )
        if per_worker and (lacking := [i for i in chosen if i not in weights]):
            raise UnknownWorkerError(
                f"no weights for workers {lacking} of worker_ids={worker_ids!r}; weights are given for "
                f"{sorted(weights)}"
            )
        return list(dict.fromkeys(chosen if per_worker else self._nobody + chosen))

    def _workers_of(self, item: Any) -> list[int]:
        try:
            if not isinstance(item, (torch.device, str, bool)):
                return [operator.index(item)]
            device = torch.device(item)
        except (RuntimeError, TypeError):
            raise UnknownWorkerError(
                f"{item!r} is neither a worker index nor a device; worker_ids= takes one of these, or a list"
            ) from None
        devices = self._sources.devices
        matching = [idx for idx, place in devices.items() if place == device]
        if not matching:
            cure = "; give init_on_sender devices= beside model= or weights=, or the collector policy_device="
            known = f"devices: {devices}" + ("" if any(devices.values()) else cure)
            raise UnknownWorkerError(f"no worker on {device} ({known})")
        return matching


class SenderSide:
    """The sender of one scheme, from its initialization on.

    If the trainer is sharded, all its ranks make one of these; the leading rank has a
    :class:`~weight_update.sender.sender.Sender` and the others have a
    :class:`~weight_update.sharded.senders.Follower`.
    """

    def __init__(
        self,
        sources: Sources,
        strategy: WeightStrategy,
        token: str,
        timeout: float,
        connect_timeout: float,
        observers: Observers,
        open_links: Callable[[Sequence[int]], tuple[Mapping[int, TransportBackend], SenderListener | None]],
    ) -> None:
        self.sources, self._reader = sources, _SourceReader(sources, strategy)
        self.listener: SenderListener | None = None  # also on ranks that do not lead
        self.failure = ""  # remark on how connect() failed last
        self._patience = 4 * timeout  # for messages of the leader, which waits for workers in between
        self._sending = threading.RLock()
        self._unchecked: list[_Unchecked] = []  # updates that nobody waits for
        self.ranks: Ranks | None = None  # connection to the other ranks of a sharded trainer
        if strategy.gather is not None or sources.sharded(strategy):
            gather = strategy.gather or GatherShards()
            self.ranks = Ranks(gather.members(), timeout, connect_timeout)
            part = GatherLeader if self.ranks.leads else GatherFollower
            self._reader.gathering = part(self.ranks, gather)
        ranks, patience = self.ranks, connect_timeout + self._patience
        self.leads = ranks is None or ranks.leads  # whether this rank serves the workers
        with _outside_inference_mode(), contextlib.ExitStack() as undo:
            undo.callback(close_all, ranks)
            with self._in_step("init_on_sender", tuple, self._reader.survey, patience) as surveyed:
                if ranks is not None and not ranks.leads:
                    ranks.follow()
                    self.sender: AnySender = Follower(ranks, timeout)
                else:
                    schemas, tracked = _schemas_of(surveyed)
                    links, self.listener = open_links(sorted(schemas))
                    undo.callback(close_all, *links.values(), self.listener)
                    arguments = links, schemas, tracked, strategy, token, timeout
                    self.sender = sender = Sender(*arguments) if ranks is None else Leader(ranks, *arguments)
                    sender.table.observers = observers
                    sender.refusals = () if self.listener is None else self.listener.refusals
            undo.pop_all()

    def _in_step(
        self, call: str, choose: Callable[[], Sequence[Any]], read: Callable[..., _T], patience: float
    ) -> contextlib.AbstractContextManager[_T]:
        """Return a context with ``read(*choose())``; all ranks enter it together, and the leader chooses."""
        if self.ranks is None:
            return contextlib.nullcontext(read(*choose()))
        return self.ranks.step(call, patience, read, choose)

    # -- connecting --------------------------------------------------------------------------------

    def admit(self, worker_idx: int, make_link: Callable[[], TransportBackend]) -> TransportBackend:
        """Return the link for a worker that joins late.

        Raise JoinRefusedError if workers have weights of their own, or the sender was shut down.
        """
        assert isinstance(self.sender, Sender), "no other rank has a listener"
        if not self.sources.common or worker_idx < 0:
            known = ", ".join(map(str, sorted({*self.sources.by_worker} - {NOBODY})))
            raise JoinRefusedError(
                f"unknown worker index {worker_idx} (known: {known}); workers can be added where all "
                "have the same weights"
            )
        return self.sender.admit(worker_idx, make_link)

    def connect(
        self,
        weights: Any,
        limit: float,
        worker_alive: WorkerAlive | None,
        prepare: Callable[[], None] = lambda: None,
    ) -> SyncReport:
        """Give every worker its first weights, and wait until all have them.

        ``prepare`` is called first, on the rank that leads; all ranks of a sharded trainer raise its error.

        Raises:
            SchemaMismatchError, SyncTimeoutError, SyncFailedError: as :meth:`Sender.connect`.
            LifecycleError: the sender was closed meanwhile.
        """

        def choose() -> tuple[list[int], bool]:
            prepare()
            return [*self.sources.nobody, *self.sender.workers], True

        if self.listener is not None:
            self.listener.refusals.clear()  # of an earlier call
            self.listener.start()
        try:
            read, patience = functools.partial(self._reader.read, weights), limit + self._patience
            with _outside_inference_mode(), self._in_step("connect", choose, read, patience) as named:
                return self.sender.connect(named, limit, liveness(worker_alive))
        except Exception as error:
            self._require_open(error)  # no worker is to blame
            self.failure = f" (connect() failed: {type(error).__name__}: {brief(error)})"
            # those two are errors of workers, and others may still get weights
            if not isinstance(error, SyncTimeoutError | SyncFailedError):
                self.sender.dismiss(error)
            raise

    # -- sending -----------------------------------------------------------------------------------

    def publish(
        self, weights: Any, worker_ids: Any, context: weakref.ref[Any] | None, group_commit: str | None
    ) -> SendHandle:
        """Send weights to workers without waiting for them; ``group_commit`` is as in :meth:`Sender.publish`.

        ``context`` refers to the object that ``weights`` is looked up in, if it is a name. LifecycleError if
        the sender was closed meanwhile.
        """
        if self._sending._is_owned():  # type: ignore[attr-defined]
            raise LifecycleError(NESTED)
        report: SyncReport | None = None
        to_all = worker_ids is None and not _is_per_worker(weights)
        try:
            with self._sending, _outside_inference_mode():
                start = time.perf_counter()
                with self._reading("send", weights, worker_ids, context) as named:
                    extract = time.perf_counter() - start
                    # nobody waits for late joiners that are still joining: they may fail to
                    apart = {NOBODY} if group_commit is None else self.sender.incomplete
                    waited_for = {*named, *self.sender.workers} - apart
                    report = self.sender.publish(named, group_commit=group_commit, to_all=to_all)
                    handle = SendHandle(self.sender, report, tuple(idx for idx in named if idx in waited_for))
                report.began -= extract
                report.seconds = {"extract": extract, **report.seconds}
        except BaseException as error:
            if report is not None and group_commit is not None:  # the caller has no handle to abort it
                self.sender.abort(report.version, [*named])
            self._require_open(error)  # close() may have taken anything away
            raise
        return handle

    def _require_open(self, error: BaseException) -> None:
        """Raise LifecycleError if the sender was closed; its cause is an ``error`` of the program."""
        if self.sender.closed and isinstance(error, Exception):
            raise LifecycleError(SHUT_DOWN) from (None if isinstance(error, WeightSyncError) else error)

    def raise_earlier_error(self, handle: SendHandle) -> None:
        """Raise the first error of an update that nobody waits for; remember ``handle`` as one more.

        The loss of a worker, which several of these updates may have in common, is raised once. Errors that
        workers raised belong to one update each.
        """
        earlier, self._unchecked = self._unchecked[-_REMEMBERED:], []
        found = self.sender.outcomes([(one.version, one.workers) for one, _ in earlier])
        bad: SyncFailedError | None = None
        for (update, raised), (settled, failures) in zip(earlier, found, strict=True):
            new = {idx: error for idx, error in failures.items() if (idx, str(error)) not in raised}
            if new and bad is None:
                bad = failed(update.version, new, update.report)
            elif new or not settled:
                self._unchecked.append((update, raised))
        if bad is not None:
            lost = {
                (idx, str(error)) for idx, error in bad.failures.items() if not isinstance(error, WorkerError)
            }
            self._unchecked = [(update, raised | lost) for update, raised in self._unchecked]
        self._unchecked.append((handle, frozenset()))
        if bad is not None:
            raise bad

    def read(self, weights: Any, context: weakref.ref[Any] | None) -> NamedWeights | None:
        """Return the weights that :meth:`publish` would send; None on ranks that do not lead."""
        with self._reading("prepare_weights", weights, None, context) as named:
            return self.sender.whole_weights(named)

    def _reading(
        self, call: str, weights: Any, worker_ids: Any, context: weakref.ref[Any] | None
    ) -> contextlib.AbstractContextManager[dict[int, NamedWeights]]:
        """Return a context, as :meth:`_in_step`, with the weights for ``worker_ids``."""

        def given() -> Any:
            return model_named(weights, context) if isinstance(weights, str) else weights

        def choose() -> tuple[list[int], bool]:
            assert isinstance(self.sender, Sender), "no other rank chooses"
            chosen = self._reader.select(worker_ids, given(), self.sender.workers)
            return chosen, self.sender.needs_all(chosen)

        def read(workers: Sequence[int], first: bool) -> dict[int, NamedWeights]:
            return self._reader.read(given(), workers, first)

        return self._in_step(call, choose, read, self._patience)


def require_links(owner: str, workers: Sequence[int], links: object) -> None:
    """Raise TypeError unless ``links`` is a dict with a transport of its own for each of ``workers``."""
    found = links if isinstance(links, dict) else {}
    distinct = {id(link) for link in found.values() if isinstance(link, TransportBackend)}
    if found is not links or {*found} != {*workers} or len(distinct) < len(found):
        raise TypeError(
            f"{owner}.open_sender() returned {links!r:.100}; return a dict with a TransportBackend of its "
            f"own for each of the workers {workers}"
        )


def _schemas_of(surveyed: _Surveyed) -> tuple[dict[int, WeightSchema], dict[int, frozenset[str] | None]]:
    """Return the schema of each worker's weights, and the names that updates carry (None: all)."""
    distinct = {id(named): named for pair in surveyed.values() for named in pair if named is not None}
    known = {key: named.schema() for key, named in distinct.items()}
    names = {key: frozenset(schema.names) for key, schema in known.items()}
    schemas = {idx: known[id(named)] for idx, (named, _) in surveyed.items()}
    return schemas, {idx: None if part is None else names[id(part)] for idx, (_, part) in surveyed.items()}


def _is_per_worker(weights: Any) -> bool:
    """Return whether ``weights`` maps worker indices to weights."""
    if not isinstance(weights, Mapping) or isinstance(weights, TensorDictBase):
        return False  # a TensorDict is a Mapping too, but one without a truth value
    return len(weights) > 0 and all(isinstance(key, int) for key in weights)


def _outside_inference_mode() -> contextlib.AbstractContextManager[Any, Any]:
    """Leave ``torch.inference_mode()``: other threads could not write into buffers that are made in it."""
    if not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    modes = contextlib.ExitStack()
    modes.enter_context(torch.inference_mode(False))
    modes.enter_context(torch.no_grad())
    return modes
