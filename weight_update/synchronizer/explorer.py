"""An explorer's client, without asyncio."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any

from torch import nn

from weight_update.checkpoints.store import ModelCheckpoints
from weight_update.errors import CorruptCheckpointError, TransportError, WeightSyncError
from weight_update.receiver.gate import Gate
from weight_update.strategy.strategy import WeightStrategy
from weight_update.synchronizer.client import ClientBase
from weight_update.synchronizer.metrics import Metrics
from weight_update.synchronizer.plan import SyncMethod, SyncStyle
from weight_update.synchronizer.rpc import Channel
from weight_update.synchronizer.sessions import CHECKPOINT, Reply
from weight_update.synchronizer.state import TRAINER_STOPPED
from weight_update.synchronizer.transfer import Endpoint, Subscriber
from weight_update.transports.shared_memory.unix_stream import deadline_of

__all__ = ["BlockingExplorer"]

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0
"""How long a background reader of files waits for one, or after one that cannot be read."""


class BlockingExplorer(ClientBase):
    """Takes new weights when the plan says so. See :class:`~weight_update.ExplorerClient`.

    Args:
        channel: to the synchronizer.
        model: module, TensorDict or dict to keep current.
        id: a number from 0 on, the same after a restart; None takes the first that is free.
        strategy: see :class:`ClientBase`.
        timeout: see :class:`ClientBase`.
        transfer_timeout: see :class:`ClientBase`.
        step: see :class:`ClientBase`.
    """

    role = "explorer"

    def __init__(
        self,
        channel: Channel,
        model: Any,
        *,
        id: int | None = None,
        strategy: str | WeightStrategy = "tensordict",
        timeout: float = 60.0,
        transfer_timeout: float = 60.0,
        step: int = 0,
    ) -> None:
        super().__init__(channel, strategy, timeout, transfer_timeout, step)
        if id is not None and id < 0:
            raise ValueError(f"id is a number from 0 on, got {id}")
        self.id, self._model = id, model
        self._subscriber: Subscriber | None = None
        self._files: ModelCheckpoints | None = None
        self._reading = threading.Lock()
        self._follower: threading.Thread | None = None
        self._useless = -1
        self._file_step = 0
        reply = self._introduce()
        if self.plan.method is SyncMethod.CHECKPOINT:
            try:
                self._open_files(reply["directory"])
            except BaseException:
                self.close()
                raise

    def _open_files(self, directory: str) -> None:
        self._files = ModelCheckpoints(directory, self.strategy)
        self._gate = Gate()
        if isinstance(self._model, nn.Module):
            self._gate.guard(self._model)
        if self.plan.style is SyncStyle.FULLY_ASYNC:
            self._follower = threading.Thread(target=self._follow, name="weight_update-files", daemon=True)
            self._follower.start()

    # -- for users ---------------------------------------------------------------------------------

    def need_sync(self) -> bool:
        """Whether :meth:`sync_weight` should be called now.

        Raises:
            LinkClosedError: the synchronizer was not there for ``timeout`` seconds.
        """
        reply = self._ask("explorer_needs", step=self.step, held=self._held())
        self._is_at(reply["version"])
        return bool(reply["need"])

    def sync_weight(self) -> Metrics:
        """Wait for new weights; when this returns they are in force.

        Returns:
            ``version`` in force; ``step`` of this side; ``seconds`` it took; ``bytes`` of the weights in
            force; ``waited``: seconds until they were here. ``reason`` only if the version is the one before:
            why. After that everything is as before, and the next step may try again.
            A logger gets other names: see :class:`~weight_update.synchronizer.Metrics`.

        Raises:
            SchemaMismatchError: the model is not the trainer's.
            LifecycleError: this side is closed, or another explorer took its place.
        """
        with self._syncing:
            start, step = time.perf_counter(), self.step
            metrics: dict[str, Any] = {"waited": 0.0}
            try:
                reply = self._sync(step, metrics)
            except TransportError as error:
                reply = {"version": self.version, "reason": str(error)}
            self._is_at(reply["version"])
            metrics["version"] = self.version
            if reply["reason"] is not None:
                metrics["reason"] = reply["reason"]
                level = logging.INFO if reply["reason"] == TRAINER_STOPPED else logging.WARNING
                _log.log(level, "explorer %s keeps version %s: %s", self.id, self.version, reply["reason"])
                self._look_at_link()
            else:
                self._synced_at = step
            metrics |= {"step": step, "bytes": self._nbytes(), "seconds": time.perf_counter() - start}
            return Metrics(metrics)

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """No update lands inside this context; use it around several forward passes in FULLY_ASYNC.

        In the other styles weights change in :meth:`sync_weight` only.
        """
        if self._files is not None:
            return self._gate.hold()
        return contextlib.nullcontext() if self._subscriber is None else self._subscriber.scheme.hold()

    def give_up(self) -> None:
        """From another thread: let :meth:`sync_weight` return now, with the version there is."""
        self._ask("explorer_gives_up", reason="it was cancelled")

    def close(self) -> None:
        """Leave; whoever waits for this side is woken. The model keeps its weights, also those of now.

        With files this waits for one that is just being read, up to ``transfer_timeout`` seconds.
        """
        with contextlib.ExitStack() as stack:  # all of it, also where a step raises
            if self._files is not None:
                stack.callback(self._end_reading)
            if self._subscriber is not None:
                stack.callback(self._subscriber.close)
            super().close()

    # -- insides -----------------------------------------------------------------------------------

    def _sync(self, step: int, metrics: dict[str, Any]) -> Reply:
        start, deadline = time.perf_counter(), deadline_of(self.timeout)
        reply = self._ask("explorer_syncs", deadline, wait=True, step=step, held=self._held(), again=False)
        while "join" in reply:
            try:
                reason = self._join(reply["join"])
            except WeightSyncError as error:  # another model than the trainer's
                self._ask("explorer_gives_up", reason=str(error))
                raise
            if reason is not None:
                return self._ask("explorer_gives_up", reason=reason)
            reply = self._ask("explorer_syncs", deadline, wait=True, step=step, held=self._held(), again=True)
        metrics["waited"] = time.perf_counter() - start
        return self._fetch(int(reply["fetch"])) if "fetch" in reply else reply

    def _join(self, endpoint: Endpoint) -> str | None:
        """Connect to where weights come from; None, or why that did not succeed."""
        if self._subscriber is not None:
            self._subscriber.close()
        assert self.id is not None
        subscriber = Subscriber(endpoint, self.id, self._model, self.strategy, self.transfer_timeout)
        reason: str | None = "the model is another than the trainer's"
        try:
            reason = subscriber.join(self.transfer_timeout)
        finally:
            if reason is not None:
                subscriber.close()
        self._subscriber = subscriber if reason is None else None
        return reason

    def _look_at_link(self) -> None:
        if self._subscriber is not None and not self._subscriber.lives():
            self._subscriber.close()
            self._subscriber = None

    def _held(self) -> list[Any] | None:
        if self._files is not None:
            return None if self.version is None else [CHECKPOINT, self.version]
        return None if self._subscriber is None else self._subscriber.held

    def _is_at(self, version: int | None) -> None:
        if version is not None and (self.version is None or version > self.version):
            self.version = version

    def _nbytes(self) -> int:
        tensors = self.strategy.named(self._model).tensors.values()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    # -- CHECKPOINT --------------------------------------------------------------------------------

    def _end_reading(self) -> None:
        """Once it is closed: nothing is put into the model any more, and the thread has ended."""
        self._gate.look_again()
        if self._reading.acquire(timeout=self.transfer_timeout):
            self._reading.release()
        if self._follower is not None:
            self._follower.join(self.transfer_timeout)
            if self._follower.is_alive():
                _log.warning("explorer %s was closed, but still reads a file", self.id)

    def _fetch(self, version: int) -> Reply:
        found, reason = None, "it could not be read"
        try:
            found, reason = self._read(version)
        finally:
            told = {"version": None, "step": 0} if found is None else {"version": found[0], "step": found[1]}
            reply = self._ask("explorer_fetched", **told, reason=reason)
        return reply

    def _read(self, version: int) -> tuple[tuple[int, int] | None, str]:
        """Read a version, or the newest that can be read; which one and its step, or None and why."""
        assert self._files is not None
        with self._reading:
            if self._closed.is_set():
                return None, "this explorer is closed"
            if self.version is not None and self.version >= version:  # the background was faster
                return (self.version, self._file_step), ""
            try:
                found = self._files.apply(
                    version, self.version, self._model, self._gate, self.transfer_timeout, self._closed
                )
            except (OSError, CorruptCheckpointError) as error:
                return None, str(error)
            if found is None:
                return None, f"version {version} cannot be read, and there is no other that is newer"
            self._is_at(found[0])
            self._file_step = found[1]
            return found, ""

    def _follow(self) -> None:
        """Thread, FULLY_ASYNC: read new versions as they come."""
        warned = False
        while not self._closed.is_set():
            reason = self._follow_once()
            if reason is not None and not self._closed.is_set():
                if not warned:
                    _log.warning("explorer %s keeps version %s: %s", self.id, self.version, reason)
                self._closed.wait(_LOOK_SECONDS)  # what is broken now is still broken at once
            warned = reason is not None

    def _follow_once(self) -> str | None:
        """Wait a while for a newer version and read it; None, or why that cannot be done."""
        assert self._files is not None
        have = -1 if self.version is None else self.version
        try:
            newest = self._files.wait_newer(max(have, self._useless), _LOOK_SECONDS, self._closed)
        except OSError as error:  # a directory that is away for a while
            return str(error)
        if newest is None:
            return None
        try:
            found, reason = self._read(newest)
        except WeightSyncError as error:  # not for this model; sync_weight() will raise it
            self._useless = newest
            return str(error)
        return reason if found is None else None
