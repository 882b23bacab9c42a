"""The trainer's client, without asyncio."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import nn

from weight_update.checkpoints.store import ModelCheckpoints
from weight_update.errors import LinkClosedError, SyncFailedError, SyncTimeoutError, TransportError
from weight_update.strategy.strategy import WeightStrategy
from weight_update.synchronizer.addresses import is_loopback, require_reachable
from weight_update.synchronizer.client import ClientBase
from weight_update.synchronizer.metrics import Metrics
from weight_update.synchronizer.plan import RunningStatus, SyncStyle
from weight_update.synchronizer.rpc import Channel
from weight_update.synchronizer.sessions import Reply
from weight_update.synchronizer.transfer import Endpoint, Publisher, Transfer
from weight_update.transports.distributed.relay.pairs import pair_of
from weight_update.transports.shared_memory.unix_stream import deadline_of

__all__ = ["BlockingTrainer"]

_log = logging.getLogger(__name__)
_HOLDER = 0
"""The synchronizer's place among those whom the trainer sends to."""
_OUTAGES = (TransportError, SyncTimeoutError, SyncFailedError, OSError)


class BlockingTrainer(ClientBase):
    """Gives weights away when the plan says so. See :class:`~weight_update.TrainerClient`.

    Args:
        channel: to the synchronizer.
        source: module, TensorDict, dict or callable that weights are read from.
        address: of the interface on which explorers (NCCL) or the synchronizer (MEMORY) reach this process;
            None: the one that leads to the synchronizer.
        backend: see :class:`~weight_update.TrainerClient`.
        strategy: see :class:`ClientBase`.
        timeout: see :class:`ClientBase`.
        transfer_timeout: see :class:`ClientBase`.
        step: steps done already; None: in FIXED as many as when the newest version was made, else 0.
    """

    role = "trainer"

    def __init__(
        self,
        channel: Channel,
        source: Any,
        *,
        address: str | None = None,
        backend: str = "gloo",
        strategy: str | WeightStrategy = "tensordict",
        timeout: float = 60.0,
        transfer_timeout: float = 60.0,
        step: int | None = None,
    ) -> None:
        super().__init__(channel, strategy, timeout, transfer_timeout, step or 0)
        if address is not None:
            require_reachable(address)
        self._source, self._given_address, self._backend = source, address, backend
        self._publisher: Publisher | None = None
        self._files: ModelCheckpoints | None = None
        pair_of(backend)  # refuses unknown ones
        if not callable(source) or isinstance(source, nn.Module):
            self.strategy.named(source)  # a client that cannot send takes nobody's place
        reply = self._introduce()
        self.version = reply["version"]
        try:
            self._go_on_after(reply["step"], step)
            self._open(reply)
        except BaseException:
            self.close()
            raise

    def _go_on_after(self, newest: int, given: int | None) -> None:
        """Take over the step of the newest version in FIXED, where explorers count on trainer steps."""
        if self.plan.style is not SyncStyle.FIXED or newest <= self.step:
            return
        if given is None:
            self.step = newest
            _log.info("the trainer goes on at step %d, at which version %s was made", newest, self.version)
        else:
            _log.warning(
                "the trainer begins at step %d, but version %s was made at step %d; explorers that are ahead "
                "of it wait until it catches up (step=None goes on at %d)",
                given,
                self.version,
                newest,
                newest,
            )

    def _open(self, reply: Reply) -> None:
        directory = reply["directory"]
        if self._backend != "gloo" and not self.plan.direct:
            raise ValueError(f"backend={self._backend!r} is for SyncMethod.NCCL, not for {self.plan.method}")
        if directory is not None:
            self._files = ModelCheckpoints(directory, self.strategy)
        else:
            self._open_publisher(self.plan.direct, reply["address"])

    def _open_publisher(self, direct: bool, served: str | None) -> None:
        address = self._given_address or self._channel.address
        if not direct and is_loopback(address):
            address = None
        if direct:
            if self._given_address is None and is_loopback(address):
                address = served  # the synchronizer is on this machine: other machines reach both by it
            address = address or "127.0.0.1"
            if self._backend == "gloo":
                cure = (
                    "backend='nccl' would go over CUDA" if torch.cuda.is_available() else "there is no CUDA"
                )
                _log.info("SyncMethod.NCCL: weights go to other hosts by gloo (%s)", cure)
        self._publisher = Publisher(
            self._source, address, self.strategy, self.transfer_timeout, self._backend
        )
        if direct:
            self._ask("hello", **self._hello())  # now with the endpoint

    def _own_endpoint(self) -> Endpoint | None:
        return None if self._publisher is None else self._publisher.endpoint

    # -- for users ---------------------------------------------------------------------------------

    def need_sync(self) -> bool:
        """Whether :meth:`sync_weight` should be called now.

        Raises:
            LinkClosedError: the synchronizer was not there for ``timeout`` seconds.
        """
        return bool(self._ask("trainer_needs", step=self.step)["need"])

    def sync_weight(self) -> Metrics:
        """Give the weights of now away: publish them (MEMORY, CHECKPOINT), or meet explorers (NCCL).

        Returns:
            ``version``: the newest published one; ``step`` of this side; ``seconds`` it took; ``bytes``
            written or sent; ``waited``: seconds until explorers were ready. ``reason`` only if nothing was
            published: why. After that everything is as before. In FULLY_ASYNC with NCCL the version is on its
            way, and counts as published when the first explorer has it.
            A logger gets other names: see :class:`~weight_update.synchronizer.Metrics`.

        Raises:
            SchemaMismatchError: the weights are not those that it began with.
            LifecycleError: this side is closed, or another trainer took its place.
        """
        with self._syncing:
            start, step = time.perf_counter(), self.step
            give = self._meet if self.plan.direct else self._publish
            try:
                metrics = give(step)
            except TransportError as error:
                metrics = {"version": self.version, "reason": str(error)}
            metrics |= {"step": step, "seconds": time.perf_counter() - start}
            if "reason" not in metrics:
                self.version, self._synced_at = metrics["version"], step
            else:
                _log.warning("step %d: nothing was published: %s", step, metrics["reason"])
            return Metrics({"bytes": 0, "waited": 0.0, **metrics})

    def give_up(self) -> None:
        """From another thread: let :meth:`sync_weight` end its wait now."""
        self._ask("notify", step=self.step, status=RunningStatus.RUNNING.value)

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._publisher is not None:
                self._publisher.close()

    # -- MEMORY, CHECKPOINT ------------------------------------------------------------------------

    def _publish(self, step: int) -> dict[str, Any]:
        version = int(self._ask("trainer_version", step=step)["version"])
        try:
            nbytes = (
                self._upload() if self._files is None else self._files.publish(version, self._source, step)
            )
            self._ask("trainer_published", step=step, version=version)
        except _OUTAGES as error:
            soon = deadline_of(self._grace)  # the synchronizer may be what is out
            return dict(self._ask("trainer_failed", soon, step=step, reason=str(error)))
        return {"version": version, "bytes": nbytes}

    def _upload(self) -> int:
        """MEMORY: send to the synchronizer, which joins (again) if it is not there."""
        assert self._publisher is not None
        if _HOLDER not in self._publisher.here():
            self._ask("take_from", ticket=self._publisher.endpoint)
        transfer = self._publisher.send([_HOLDER])
        if failures := transfer.settle([_HOLDER]):
            raise LinkClosedError(f"the synchronizer did not take the weights: {failures[_HOLDER]}")
        return transfer.nbytes

    # -- NCCL --------------------------------------------------------------------------------------

    def _meet(self, step: int) -> dict[str, Any]:
        start, deadline = time.perf_counter(), deadline_of(self.timeout)
        reply = self._ask("meet", deadline, wait=True, step=step)
        waited = time.perf_counter() - start
        if reply.get("reason") is not None:
            return {"version": reply["version"], "reason": reply["reason"], "waited": waited}
        ids, version = reply["ids"], reply["version"]
        failures = dict.fromkeys(ids, "the trainer did not send")
        transfers: list[Transfer] = []
        outage: Exception | None = None
        try:
            transfers = self._send(ids)
            failures = transfers[0].settle(ids) if ids else {}
        except _OUTAGES as error:
            outage, failures = error, {id: str(error) for id in ids}
        finally:
            self._ask(
                "met",
                step=step,
                version=version,
                numbers=[one.number for one in transfers],
                ids=ids,
                failures=failures,
            )
        metrics = {"version": version, "bytes": sum(one.nbytes for one in transfers), "waited": waited}
        sent = set().union(*(one.ids for one in transfers))
        if (outage is not None or failures) and sent <= set(failures):
            why = "; ".join(f"explorer {id}: {text}" for id, text in failures.items())
            metrics.update(version=self.version, reason=why or str(outage))
        return metrics

    def _send(self, ids: list[int]) -> list[Transfer]:
        """To those who are ready; in FULLY_ASYNC to all others too, who take it when they can."""
        assert self._publisher is not None
        transfers = [self._publisher.send(ids)] if ids else []
        if self.plan.style is SyncStyle.FULLY_ASYNC:
            try:
                transfers.append(self._publisher.spread(but=ids))
            except _OUTAGES as error:
                if not transfers:
                    raise
                _log.warning(
                    "step %d: explorers that did not wait were not sent weights: %s", self.step, error
                )
        return transfers
