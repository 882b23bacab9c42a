"""The sending side of a scheme: reads weights from their sources and hands them to the sender."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from weight_update.errors import JoinRefusedError
from weight_update.report import SyncReport
from weight_update.schemes.collector import resolve_path
from weight_update.schemes.liveness import WorkerAlive, liveness
from weight_update.schemes.sources import Sources
from weight_update.sender.handle import SendHandle, failed
from weight_update.sender.sender import Sender
from weight_update.sharded import Follower, Gathering, Leader, Ranks
from weight_update.strategy.named_weights import NamedWeights
from weight_update.strategy.strategy import GatherShards, WeightStrategy
from weight_update.transports.base import TransportBackend
from weight_update.transports.rate_limit import Refusals
from weight_update.wire.schema import WeightSchema

__all__ = ["SenderListener", "SenderSide", "close_all"]

_REMEMBERED = 64
"""Number of updates of ``sync=False`` that nobody waits for and whose errors are still reported."""
_T = TypeVar("_T")
_UNCHANGED = contextlib.nullcontext()
_Surveyed = Mapping[int, tuple[NamedWeights, NamedWeights | None]]


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


class SenderSide:
    """The sender of one scheme, from its initialization on.

    If the trainer is sharded, all its ranks make one of these; the leading rank has a
    :class:`~weight_update.sender.sender.Sender` and the others have a
    :class:`~weight_update.sharded.Follower`.

    Args:
        sources: where weights are read from.
        strategy: how weights are read and encoded.
        timeout: seconds an update may take until all workers have applied it.
        connect_timeout: seconds to wait for the other ranks of a sharded trainer.

    Attributes:
        sources: the same.
        sender: sends versions to the workers, or follows the rank that does; set by :meth:`open`.
        listener: admits workers; None if links need no listener.
    """

    sender: Sender | Follower

    def __init__(
        self, sources: Sources, strategy: WeightStrategy, timeout: float, connect_timeout: float
    ) -> None:
        self.sources = sources
        self.listener: SenderListener | None = None
        self._strategy, self._timeout, self._connect_timeout = strategy, timeout, connect_timeout
        self._ranks = self._meet_ranks()
        self._sending = threading.Lock()
        self._unchecked: list[SendHandle] = []  # updates that nobody waits for

    def _meet_ranks(self) -> Ranks | None:
        """Return the connection to the other ranks; None if the trainer is not sharded."""
        gather = self._strategy.gather
        if gather is None and not self.sources.sharded(self._strategy):
            return None
        gather = gather or GatherShards()
        ranks = Ranks(gather.members(), self._timeout, self._connect_timeout)
        self.sources.gathering = Gathering(ranks, gather)
        return ranks

    def _in_step(
        self, call: str, read: Callable[[Sequence[int] | None], _T], patience: float
    ) -> contextlib.AbstractContextManager[_T]:
        """Return a context with the result of ``read``; all ranks of a sharded trainer enter it together."""
        if self._ranks is None:
            return contextlib.nullcontext(read(None))
        return self._ranks.step(call, read, patience)

    @property
    def parts(self) -> tuple[Any, ...]:
        """Everything that :func:`close_all` must close at the end."""
        return self.sender, self.listener, self._ranks

    @property
    def _patience(self) -> float:
        """Seconds that may pass between two messages of the leader, which waits for workers meanwhile."""
        return 4 * self._timeout

    # -- connecting --------------------------------------------------------------------------------

    def open(
        self,
        token: str,
        open_links: Callable[[Sequence[int]], Mapping[int, TransportBackend]],
        listener: Callable[[], SenderListener | None],
    ) -> None:
        """Make the sender.

        Args:
            token: secret that workers are admitted by.
            open_links: makes the sender's end of the link to each of the workers of these indices.
            listener: returns the listener that ``open_links`` made, if any.
        """
        patience = self._connect_timeout + self._patience
        try:
            with (
                _outside_inference_mode(),
                self._in_step(
                    "init_on_sender", lambda _: self.sources.survey(self._strategy), patience
                ) as surveyed,
            ):
                self.sender = self._make_sender(surveyed, token, open_links, listener)
        except BaseException:
            if self._ranks is not None:
                self._ranks.close()
            raise

    def _make_sender(
        self,
        surveyed: _Surveyed,
        token: str,
        open_links: Callable[[Sequence[int]], Mapping[int, TransportBackend]],
        listener: Callable[[], SenderListener | None],
    ) -> Sender | Follower:
        ranks = self._ranks
        if ranks is not None and not ranks.leads:
            ranks.follow()
            return Follower(ranks, self._timeout)
        schemas, tracked = _schemas_of(surveyed)
        links = open_links(sorted(schemas))
        self.listener = listener()
        arguments = links, schemas, tracked, self._strategy, token, self._timeout
        try:
            return Sender(*arguments) if ranks is None else Leader(ranks, *arguments)
        except BaseException:
            close_all(*links.values(), self.listener)
            raise

    def admit(self, worker_idx: int, make_link: Callable[[], TransportBackend]) -> TransportBackend:
        """Return the link for a worker that joins late.

        Raises:
            JoinRefusedError: workers have weights of their own, or the sender was shut down.
        """
        if not isinstance(self.sender, Sender):
            raise JoinRefusedError("the scheme was shut down")
        if not self.sources.common or worker_idx < 0:
            known = ", ".join(map(str, sorted(self.sources.by_worker)))
            raise JoinRefusedError(
                f"unknown worker index {worker_idx} (known: {known}); workers can be added where all "
                "have the same weights"
            )
        return self.sender.admit(worker_idx, make_link)

    def connect(self, weights: Any, limit: float, worker_alive: WorkerAlive | None) -> SyncReport:
        """Give every worker its first weights, and wait until all have them.

        Args:
            weights: first weights; None reads the sources.
            limit: seconds to wait.
            worker_alive: as :attr:`WeightSyncScheme.worker_alive`.

        Raises:
            SchemaMismatchError, SyncTimeoutError, SyncFailedError: as :meth:`Sender.connect`.
        """
        sender = self.sender

        def read(workers: Sequence[int] | None) -> dict[int, NamedWeights]:
            chosen = sender.workers if workers is None else workers
            return self.sources.with_late_joiners(chosen).read(self._strategy, weights, chosen, first=True)

        if self.listener is not None and isinstance(sender, Sender):
            self.listener.refusals.clear()  # of an earlier call
            sender.refusals = self.listener.refusals
            self.listener.start()
        with (
            _outside_inference_mode(),
            self._in_step("connect", read, limit + self._patience) as named,
        ):
            return sender.connect(named, limit, liveness(worker_alive))

    # -- sending -----------------------------------------------------------------------------------

    def publish(self, weights: Any, worker_ids: Any, context: Any, **how: Any) -> SendHandle:
        """Send weights to workers without waiting for them.

        Args:
            weights: as for :meth:`WeightSyncScheme.send`.
            worker_ids: as for :meth:`WeightSyncScheme.send`.
            context: object that ``weights`` is looked up in, if it is a name.
            how: further arguments of :meth:`Sender.publish`.
        """
        with self._sending, _outside_inference_mode():
            start = time.perf_counter()
            read = self._reader(weights, worker_ids, context)
            with self._in_step("send", read, self._patience) as named:
                extract = time.perf_counter() - start
                handle = SendHandle(self.sender, self.sender.publish(named, **how), tuple(named))
            handle.report.seconds = {"extract": extract, **handle.report.seconds}
        return handle

    def raise_earlier_error(self, handle: SendHandle) -> None:
        """Raise the first error of an update that nobody waits for; remember ``handle`` as one more.

        Raises:
            SyncFailedError: workers did not take an earlier update.
        """
        earlier, self._unchecked = self._unchecked[-_REMEMBERED:], [handle]
        if not earlier:
            return
        found = self.sender.outcomes([(one.version, one.workers) for one in earlier])
        outcomes = list(zip(earlier, found, strict=True))
        bad = next((one for one, (_, failures) in outcomes if failures), None)
        still = [one for one, (settled, failures) in outcomes if failures or not settled]
        self._unchecked = [*(one for one in still if one is not bad), *self._unchecked]
        if bad is not None:
            raise failed(bad.version, dict(outcomes)[bad][1], bad.report)

    def read(self, weights: Any, context: Any) -> NamedWeights | None:
        """Return the weights that :meth:`publish` would send; None on ranks that do not lead."""
        read = self._reader(weights, None, context)
        with self._in_step("prepare_weights", read, self._patience) as named:
            return self.sender.whole_weights(named)

    def _reader(
        self, weights: Any, worker_ids: Any, context: Any
    ) -> Callable[[Sequence[int] | None], dict[int, NamedWeights]]:
        """Return a function that reads weights for ``worker_ids``, or for workers that another rank names."""

        def read(workers: Sequence[int] | None) -> dict[int, NamedWeights]:
            found = weights
            if isinstance(weights, str):
                if context is None:
                    raise ValueError(
                        f"weights={weights!r} names a model, but there is no context to find it in"
                    )
                found = resolve_path(context, weights)
            sources = self.sources.with_late_joiners(self.sender.workers if workers is None else workers)
            chosen = sources.select(worker_ids, found) if workers is None else workers
            return sources.read(self._strategy, found, chosen)

        return read


def _schemas_of(
    surveyed: _Surveyed,
) -> tuple[dict[int, WeightSchema], dict[int, frozenset[str] | None]]:
    """Return the schema of each worker's weights, and the names that updates carry (None: all)."""
    known: dict[int, WeightSchema] = {}
    for named in (one for pair in surveyed.values() for one in pair if one is not None):
        if id(named) not in known:
            known[id(named)] = named.schema()
    schemas = {idx: known[id(named)] for idx, (named, _) in surveyed.items()}
    tracked = {
        idx: None if part is None else frozenset(known[id(part)].names) for idx, (_, part) in surveyed.items()
    }
    return schemas, tracked


def _outside_inference_mode() -> contextlib.AbstractContextManager[Any, Any]:
    """Leave ``torch.inference_mode()``: other threads could not write into buffers that are made in it."""
    if not torch.is_inference_mode_enabled():
        return _UNCHANGED
    modes = contextlib.ExitStack()
    modes.enter_context(torch.inference_mode(False))
    modes.enter_context(torch.no_grad())
    return modes


def close_all(*parts: Sender | Follower | TransportBackend | SenderListener | Ranks | None) -> None:
    """Close all parts, last to first, whatever one of them raises."""
    with contextlib.ExitStack() as rest:
        for part in reversed(parts):
            if part is not None:
                rest.callback(part.close)
