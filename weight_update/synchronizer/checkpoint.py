"""SyncMethod.CHECKPOINT: the trainer writes files, and explorers read them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from typing import Any

from torch import nn

from weight_update.checkpoints.manifest import Manifest
from weight_update.checkpoints.store import CheckpointStore
from weight_update.engines.base import InferenceEngine
from weight_update.errors import CorruptCheckpointError, UnsupportedSourceError
from weight_update.receiver.gate import Gate
from weight_update.report import SyncReport
from weight_update.strategy.named_weights import NamedWeights, from_items
from weight_update.synchronizer.client import ClientBase
from weight_update.synchronizer.methods import ExplorerMethod, StoringTrainer
from weight_update.synchronizer.plan import SyncPlan, SyncStyle
from weight_update.synchronizer.service import Service, outcome_of
from weight_update.synchronizer.sessions import Held, Reply
from weight_update.synchronizer.state import ExplorerState
from weight_update.threads import start_thread
from weight_update.transports.socket_stream import deadline_of
from weight_update.wire.schema import WeightSchema

_log = logging.getLogger(__name__)
_SOURCE = "checkpoint"
"""In place of the key of a publisher: the number of the update is then a version, read from a file."""
_LOOK_SECONDS = 1.0
"""Seconds that a background reader waits for a new file, and after one that cannot be read."""


class CheckpointTrainer(StoringTrainer):
    """The trainer's part: it writes a file for each version into a directory that all share."""

    def __init__(self, source: Any, directory: str) -> None:
        self._source, self._store = source, CheckpointStore(directory)

    def store(self, client: ClientBase, version: int, step: int) -> SyncReport:
        began, start = time.time(), time.perf_counter()
        strategy = client.strategy
        chosen = strategy.chosen(self._source) if strategy.partial else None
        named = strategy.outgoing(self._source, chosen)
        if named.sharded:
            raise UnsupportedSourceError(
                "these weights are sharded (DTensor), and a file has whole ones: give a function that "
                "returns the DTensor.full_tensor() of each"
            )
        named = named.converted()
        tensors = {name: value.detach() for name, value in named.tensors.items()}
        extracted = time.perf_counter()
        self._store.publish(version, {**tensors, **named.extra}, step=step)
        seconds = {"extract": extracted - start, "send": time.perf_counter() - extracted}
        nbytes = WeightSchema.of(tensors).dense_bytes
        return SyncReport(version, "checkpoint", nbytes, nbytes, seconds=seconds, began=began)


class CheckpointExplorer(ExplorerMethod):
    """The explorer's part: it reads files, in FULLY_ASYNC in a thread of its own."""

    def __init__(self, client: ClientBase, model: Any, directory: str) -> None:
        if isinstance(model, InferenceEngine):
            raise UnsupportedSourceError(
                "SyncMethod.CHECKPOINT writes into a module, TensorDict or dict; an inference engine takes "
                "weights by SyncMethod.NCCL or MEMORY"
            )
        self._model, self._strategy, self._store = model, client.strategy, CheckpointStore(directory)
        self._id, self._timeout = client.id, client.transfer_timeout
        self._reading = threading.RLock()  # a signal handler may call close() while it is held
        self._reader: threading.Thread | None = None
        self._step = 0
        self.gate = Gate()
        unguard = self.gate.guard(model) if isinstance(model, nn.Module) else lambda: None
        self._unguard = weakref.finalize(self, unguard)
        if client.plan.style is SyncStyle.FULLY_ASYNC:
            args = weakref.ref(client), client.closed
            self._reader = start_thread("weight_update-files", self._read_all, *args)

    def held(self, version: int | None) -> Held:
        return None if version is None else [_SOURCE, version]

    def sync(self, client: ClientBase, step: int, metrics: dict[str, Any]) -> Reply:
        start = time.perf_counter()
        held = self.held(client.version)
        reply = client.ask("explorer_syncs", wait=True, step=step, held=held, again=False)
        metrics["waited"] = time.perf_counter() - start
        return self.fetch(client, int(reply["fetch"])) if "fetch" in reply else reply

    def fetch(self, client: ClientBase, version: int) -> Reply:
        """Read a version, tell the synchronizer how that ended, and return its reply."""
        read, step, reason = None, 0, "it could not be read"
        try:
            read, step, reason = self._read(client, version)
        finally:
            reply = client.ask("explorer_fetched", version=read, step=step, reason=reason)
        return reply

    def close(self) -> None:
        """Wait until nothing is put into the model any more, and the thread has ended."""
        self.gate.look_again()
        if self._reading.acquire(timeout=self._timeout):
            self._reading.release()
        if self._reader is not None:
            self._reader.join(self._timeout)
            if self._reader.is_alive():
                _log.warning("explorer %s was closed, but still reads a file", self._id)
        self._unguard()

    def _read(self, client: ClientBase, version: int) -> tuple[int | None, int, str]:
        """Read a version, or else the newest that can be read, and put it into the model.

        Return version and trainer step of what is in force now; or None, 0 and why nothing was read.
        """
        with self._reading:
            if client.closed.is_set():
                return None, 0, "this explorer is closed"
            if client.version is not None and client.version >= version:  # the background reader was faster
                return client.version, self._step, ""
            try:
                newest = self._store.latest()
                for candidate in dict.fromkeys([version, -1 if newest is None else newest.version]):
                    if candidate > (-1 if client.version is None else client.version):
                        manifest = self._apply(candidate, client)
                        if manifest is not None:
                            self._step = manifest.step
                            return candidate, self._step, ""
            except (OSError, CorruptCheckpointError) as error:
                return None, 0, str(error)
            return None, 0, f"version {version} cannot be read, and there is no other that is newer"

    def _apply(self, version: int, client: ClientBase) -> Manifest | None:
        """Put a version into the model between forward passes; return its manifest, None if unreadable."""

        def put(weights: NamedWeights) -> None:
            self._strategy.apply_weights(self._model, weights)
            client.advance_to(version)  # before a forward pass, or a hold, sees the weights

        manifest = self._store.manifest(version)
        if manifest is None:
            return None
        try:
            with self._store.reading(version) as found:
                if self._store.manifest(version) != manifest:  # it was replaced meanwhile
                    return self._apply(version, client)
                if client.closed.is_set():  # by a signal handler, in this thread
                    return None
                weights = from_items(found.items())
                self.gate.run(lambda: put(weights), self._timeout, client.closed.is_set)
        except (CorruptCheckpointError, FileNotFoundError) as error:
            _log.warning("checkpoint %d is not used: %s", version, error)
            return None
        return manifest

    def _read_all(self, ref: weakref.ref[ClientBase], closed: threading.Event) -> None:
        """Read new versions as they come, as a thread, until the client is closed or dropped."""
        have, unfit, warned = -1, -1, False
        while not closed.is_set():
            newest, reason = None, None
            try:
                newest = self._store.wait_newer(max(have, unfit), _LOOK_SECONDS, closed)
            except OSError as error:  # a directory that is away for a while
                reason = str(error)
            client = ref()
            if client is None:
                return
            if newest is not None:
                try:
                    read, _, why = self._read(client, newest.version)
                    reason = why if read is None else None
                except Exception as error:  # noqa: BLE001 - later versions are read all the same
                    unfit, reason = newest.version, str(error) or type(error).__name__
            if reason is not None and not (warned or closed.is_set()):
                held = "has no version yet" if client.version is None else f"keeps version {client.version}"
                _log.warning("explorer %s %s: %s", client.id, held, reason)
            have, warned = -1 if client.version is None else client.version, reason is not None
            del client
            if reason is not None:
                closed.wait(_LOOK_SECONDS)  # a file that is broken now stays so for a moment


class CheckpointService(Service):
    """The synchronizer's part: it tells explorers which version to read.

    The manifests in the directory tell which version is the newest, so no version file is kept.
    """

    calls = (*Service.calls, "trainer_published", "explorer_fetched")

    def __init__(self, plan: SyncPlan, directory: str, **options: Any) -> None:
        super().__init__(plan, **options)
        self.directory = directory
        self._store = CheckpointStore(directory)
        self._store.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._reserved = self._store.last_number()
        if (newest := self._store.latest()) is not None:
            _log.info(
                "continuing after version %d (step %d), which %s holds; use a new directory for a new run",
                newest.version,
                newest.step,
                directory,
            )
            self._restore(newest.version, newest.step)

    def _version_of(self, key: str, number: int) -> tuple[int, int] | None:
        newest = self.machine.newest
        return None if newest is None or number > newest else (number, self.machine.newest_step)

    def trainer_version(self, session: str, step: int) -> Reply:
        with contextlib.suppress(OSError):  # the trainer, which cannot write either, will say so
            written = self._store.last_number()  # perhaps never reported, and read by explorers all the same
            with self.changed:
                self._reserved = max(self._reserved, written)
        return super().trainer_version(session, step)

    def trainer_published(self, session: str, step: int, version: int, report: Reply | None = None) -> Reply:
        """Note that the file of a version is complete."""
        with self.changed:
            self._trainer(session, step)
            self.machine.published(version, step)
            self.machine.offered(step)
        self._tell(report)
        return {"version": version}

    def explorer_syncs(self, session: str, step: int, held: Held, timeout: float, again: bool) -> Reply:
        deadline = deadline_of(timeout)
        with self.changed:
            explorer = self._explorer(session, step, held)
            self.machine.explorer_requires(explorer.id)
            ready = self._await_turn(
                explorer, deadline, timeout, lambda: self.machine.may_fetch(explorer.id) is not None
            )
            if not ready:
                return outcome_of(explorer)
            version = self.machine.may_fetch(explorer.id)
            self.machine.begin([explorer.id])
            return {"fetch": version}

    def explorer_fetched(self, session: str, version: int | None, step: int, reason: str) -> Reply:
        """Note that an explorer has read a version made at the trainer's ``step``, or could not."""
        with self.changed:
            explorer = self.member(session)
            assert isinstance(explorer, ExplorerState)
            if version is None:
                self.machine.failed(explorer.id, reason)
                return {"version": explorer.version, "reason": reason}
            self.machine.published(version, step)
            self._note_version(self.machine.delivered, explorer.id, version)
            return {"version": version, "reason": None}
