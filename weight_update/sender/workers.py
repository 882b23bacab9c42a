"""The workers of a sender, and what each of them has."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping

from weight_update.errors import LinkClosedError, SchemaMismatchError, SyncFailedError, SyncTimeoutError
from weight_update.report import SyncReport
from weight_update.sender.peer import Peer

__all__ = ["Roll"]

_LOOK_SECONDS = 0.2


class Roll:
    """All workers; who waits for one of them waits here.

    A late joiner that has gone is removed. It is remembered for as long as somebody holds it, such as the
    handle of an update that it missed.

    Args:
        peers: the workers, by index.

    Attributes:
        moved: the sender's lock; notified whenever the state of a worker changed.
    """

    def __init__(self, peers: Iterable[Peer]) -> None:
        self.moved = threading.Condition(threading.RLock())
        self._peers = {peer.idx: peer for peer in peers}
        self._removed: weakref.WeakValueDictionary[int, Peer] = weakref.WeakValueDictionary()

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def __contains__(self, idx: object) -> bool:
        return idx in self._peers

    def __getitem__(self, idx: int) -> Peer:
        return self._peers[idx]

    def add(self, peer: Peer) -> None:
        """One more worker; whoever is walking through the others does not meet it."""
        with self.moved:
            self._peers = {**self._peers, peer.idx: peer}

    def remove(self, peer: Peer) -> None:
        """Forget a late joiner that has gone."""
        with self.moved:
            self._peers = {idx: one for idx, one in self._peers.items() if one is not peer}
            self._removed[peer.idx] = peer

    def known(self, workers: Iterable[int]) -> list[Peer]:
        """Return the workers of these indices, without late joiners that are forgotten."""
        with self.moved:
            found = [self._peers.get(idx) or self._removed.get(idx) for idx in workers]
        return [peer for peer in found if peer is not None]

    def removed(self, idx: int) -> Peer | None:
        """Return a late joiner that has gone, if somebody still holds it."""
        return self._removed.get(idx)

    @property
    def present(self) -> list[Peer]:
        """Return all initial workers and the late joiners that are connected, by index."""
        return sorted((peer for peer in self if peer.joined or not peer.guest), key=lambda peer: peer.idx)

    @property
    def workers(self) -> tuple[int, ...]:
        """Return the indices of :attr:`present`."""
        return tuple(peer.idx for peer in self.present)

    @property
    def expected(self) -> list[Peer]:
        """Those of the first number."""
        return [peer for peer in self if not peer.guest]

    @property
    def absent(self) -> list[Peer]:
        """Those of the first number that have not come, for no known reason."""
        return [peer for peer in self.expected if not peer.joined and peer.trouble() is None]

    @property
    def unsettled(self) -> list[Peer]:
        """Those of the first number that have neither weights nor a reason why not."""
        return [
            peer
            for peer in self.expected
            if peer.trouble() is None and (not peer.joined or peer.version is None)
        ]

    def await_none(
        self, missing: Callable[[], list[Peer]], deadline: float, alive: Callable[[int], bool] | None
    ) -> None:
        """Wait until nobody is ``missing`` or the deadline has passed.

        Args:
            missing: who is waited for.
            deadline: on the monotonic clock.
            alive: tells whether the process of a worker lives, if the caller knows.
        """
        with self.moved:
            while missing() and time.monotonic() < deadline:
                for peer in missing():
                    if alive is not None and not alive(peer.idx):
                        peer.lost = LinkClosedError("its process died before it connected")
                self.moved.wait(_LOOK_SECONDS)

    def require_all(self, timeout: float, refusals: Iterable[str] = ()) -> None:
        """Raise the error of those of the first number that have no weights after so many seconds, if any.

        Args:
            timeout: seconds that were waited.
            refusals: why the listener refused join requests meanwhile.

        Raises:
            SchemaMismatchError, SyncTimeoutError, SyncFailedError: see ``WeightSyncScheme.connect``.
        """
        with self.moved:
            failures = {peer.idx: error for peer in self.expected if (error := peer.trouble()) is not None}
            late = [peer.idx for peer in self.unsettled]
            guests = [peer.idx for peer in self if peer.guest and peer.joined]
            refused = [f"worker {peer.idx}: {peer.lost}" for peer in self if peer.guest and peer.lost]
        _raise_connect(failures, late, guests, timeout, [*refusals, *refused])

    def wait_staged(self, version: int, workers: Iterable[int], timeout: float) -> dict[int, Exception]:
        """Wait until workers have ``version`` staged; the errors of those that do not."""

        def settled(peer: Peer) -> bool:
            return peer.staged == version or not peer.joined or version in peer.failures

        return self._wait(version, workers, timeout, settled, lambda peer: peer.staged == version, True)

    def wait_applied(
        self, version: int, workers: Iterable[int], timeout: float, *, patient: bool
    ) -> dict[int, Exception]:
        """Wait until workers have applied ``version`` or a newer one; the errors of those that did not.

        Args:
            version: number of the update.
            workers: indices.
            timeout: seconds.
            patient: do not count, for a worker, the time in which something is still being written to it.
                That time counts if the worker joins again meanwhile.
        """

        def has_it(peer: Peer) -> bool:
            return peer.reached >= version

        def settled(peer: Peer) -> bool:
            return has_it(peer) or not peer.awaited or peer.failure(version) is not None

        return self._wait(version, workers, timeout, settled, has_it, patient)

    def _wait(
        self,
        version: int,
        workers: Iterable[int],
        timeout: float,
        settled: Callable[[Peer], bool],
        good: Callable[[Peer], bool],
        patient: bool,
    ) -> dict[int, Exception]:
        peers = self.known(workers)
        deadline = time.monotonic() + timeout
        later: dict[int, tuple[int, float]] = {}  # connection and deadline of those that are still written to
        with self.moved:
            while waited_for := [peer for peer in peers if not settled(peer)]:
                now = time.monotonic()
                for peer in waited_for if patient else ():
                    if peer.writing and later.get(peer.idx, (peer.arrivals,))[0] == peer.arrivals:
                        later[peer.idx] = peer.arrivals, now + timeout
                last = deadline
                if later:
                    known = ((peer.arrivals, later.get(peer.idx)) for peer in waited_for)
                    last = max(one[1] if one and one[0] == arrivals else deadline for arrivals, one in known)
                if now >= last:
                    break
                self.moved.wait(last - now)
            bad = [peer for peer in peers if not good(peer) and peer.missed]
            return {peer.idx: _reason(peer, version, timeout) for peer in bad}

    def failures(self, version: int, workers: Iterable[int]) -> dict[int, Exception]:
        """The errors known by now of workers that will not apply ``version``; does not wait."""
        with self.moved:
            found = {}
            for peer in self.known(workers):
                if version in peer.failures:
                    found[peer.idx] = peer.failures[version]
                elif not peer.joined and peer.reached < version and peer.missed:
                    found[peer.idx] = peer.lost or LinkClosedError("it is not connected")
            return found

    def settled(self, version: int, workers: Iterable[int]) -> bool:
        """Whether nothing more is to be waited for."""
        with self.moved:
            return all(
                not peer.joined or peer.reached >= version or peer.failure(version) is not None
                for peer in self.known(workers)
            )

    def fill(self, report: SyncReport, workers: Iterable[int]) -> None:
        """Enter into ``report`` what the workers said."""
        with self.moved:
            for peer in self.known(workers):
                if peer.reached >= report.version:
                    report.apply_seconds[peer.idx] = peer.apply_seconds
                    report.stall_seconds[peer.idx] = peer.stall_seconds


def _reason(peer: Peer, version: int, timeout: float) -> Exception:
    """Why a worker does not have ``version`` after so many seconds."""
    if (error := peer.failure(version)) is not None:
        return error
    if not peer.joined:
        return peer.lost or LinkClosedError("it is not connected")
    if not peer.awaited:
        return LinkClosedError(
            "it joined while this version was being sent; it gets weights with the next send()"
        )
    return SyncTimeoutError(
        f"did not apply it within {timeout:g} s: it is stopped, or in hold() or a long forward pass; it gets "
        "the newest version when it goes on (or raise timeout=)"
    )


def _raise_connect(
    failures: Mapping[int, Exception],
    late: list[int],
    guests: list[int],
    timeout: float,
    refusals: list[str],
) -> None:
    refused = "".join(f"\n  {reason}" for reason in dict.fromkeys(refusals))
    if refused:
        refused = f"\njoin requests were refused meanwhile:{refused}"
    mismatches = [error for error in failures.values() if isinstance(error, SchemaMismatchError)]
    if mismatches:
        problems = tuple(line for error in mismatches for line in error.problems)
        raise SchemaMismatchError(str(mismatches[0]).partition("\n")[0], problems)
    if failures:
        silent = {idx: SyncTimeoutError(f"did not come within {timeout:g} s") for idx in late}
        failures = {**failures, **silent}
        lines = "".join(f"\n  worker {idx}: {error}" for idx, error in sorted(failures.items()))
        raise SyncFailedError(f"workers could not connect:{lines}{refused}", failures)
    if late:
        others = f" (others did: {guests}; do the indices match?)" if guests else ""
        raise SyncTimeoutError(
            f"workers {late} did not connect within {timeout:g} s{others}"
            f"{refused or '; have they called connect()?'}"
        )
