"""The workers of a sender, and what each of them has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from weight_update.errors import LinkClosedError, SyncTimeoutError
from weight_update.peer import Peer
from weight_update.report import SyncReport

__all__ = ["Roll"]


class Roll:
    """All workers; who waits for one of them waits here.

    Args:
        peers: the workers, by index.

    Attributes:
        moved: the sender's lock; notified whenever the state of a worker changed.
    """

    def __init__(self, peers: Iterable[Peer]) -> None:
        self.moved = threading.Condition(threading.RLock())
        self._peers = {peer.idx: peer for peer in peers}

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

    @property
    def workers(self) -> tuple[int, ...]:
        """Indices of all workers; of those beyond the first number, of who is here now."""
        return tuple(sorted(peer.idx for peer in self if peer.joined or not peer.guest))

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
        peers = [self[idx] for idx in workers]
        with self.moved:
            self.moved.wait_for(lambda: all(map(settled, peers)), timeout)
            return {peer.idx: _reason(peer, version, timeout) for peer in peers if not good(peer)}

    def failures(self, version: int, workers: Iterable[int]) -> dict[int, Exception]:
        """The errors known by now of workers that will not apply ``version``; does not wait."""
        with self.moved:
            found = {}
            for idx in workers:
                peer = self[idx]
                if version in peer.failures:
                    found[idx] = peer.failures[version]
                elif not peer.joined and peer.reached < version:
                    found[idx] = peer.lost or LinkClosedError("it is not connected")
            return found

    def settled(self, version: int, workers: Iterable[int]) -> bool:
        """Whether nothing more is to be waited for."""
        with self.moved:
            return all(
                not peer.joined or peer.reached >= version or peer.failure(version) is not None
                for peer in (self[idx] for idx in workers)
            )

    def fill(self, report: SyncReport, workers: Iterable[int]) -> None:
        """Enter into ``report`` what the workers said."""
        with self.moved:
            for idx in workers:
                peer = self[idx]
                if peer.reached >= report.version:
                    report.apply_seconds[idx] = peer.apply_seconds
                    report.stall_seconds[idx] = peer.stall_seconds


def _reason(peer: Peer, version: int, timeout: float) -> Exception:
    """Why a worker does not have ``version`` after so many seconds."""
    if (error := peer.failure(version)) is not None:
        return error
    if not peer.joined:
        return peer.lost or LinkClosedError("it is not connected")
    return SyncTimeoutError(
        f"did not apply it within {timeout:g} s: it is stopped, or in hold() or a long forward pass; it gets "
        "the newest version when it goes on (or raise timeout=)"
    )
