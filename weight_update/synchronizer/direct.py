"""SyncMethod.NCCL: the trainer sends to explorers directly, when both sides are ready."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from weight_update.errors import TransportError
from weight_update.report import WorkerEvent
from weight_update.sender.handle import SendHandle
from weight_update.synchronizer.client import ClientBase
from weight_update.synchronizer.methods import OUTAGES, TrainerMethod
from weight_update.synchronizer.plan import RunningStatus, SyncStyle
from weight_update.synchronizer.service import Service, has_ended, outcome_of
from weight_update.synchronizer.sessions import Held, Reply
from weight_update.synchronizer.state import ExplorerState, remember
from weight_update.synchronizer.transfer import Endpoint, Publisher, is_loopback, key_of, settle, shortened
from weight_update.text import format_seconds
from weight_update.transports.socket_stream import deadline_of

_log = logging.getLogger(__name__)


class DirectTrainer(TrainerMethod):
    """The trainer's part: a publisher that explorers join.

    ``served`` is the address by which other machines reach the synchronizer, if there is one.
    """

    def __init__(
        self, client: ClientBase, source: Any, address: str | None, served: str | None, backend: str
    ) -> None:
        found = address or client.channel.address
        if address is None and is_loopback(found):
            found = served  # the synchronizer is on this machine: other machines reach both by it
        if backend == "gloo":
            cure = "backend='nccl' would go over CUDA" if torch.cuda.is_available() else "there is no CUDA"
            _log.info("SyncMethod.NCCL: weights go to other hosts over TCP (%s)", cure)
        timeout = client.transfer_timeout
        tell = partial(_tell_full, weakref.ref(client))
        self.publisher: Publisher = Publisher(
            source, found or "127.0.0.1", client.strategy, timeout, backend, tell
        )
        self.publisher.endpoint["step"] = client.step  # of update 0

    def give(self, client: ClientBase, step: int) -> dict[str, Any]:
        start = time.perf_counter()
        reply = client.ask("meet", wait=True, step=step)
        waited = time.perf_counter() - start
        if "reason" in reply:
            return {**reply, "waited": waited}
        ids, version = reply["ids"], reply["version"]
        failures = dict.fromkeys(ids, "the trainer did not send")
        transfer: SendHandle | None = None
        outage: Exception | None = None
        numbers, nbytes, report = list[int](), 0, None
        try:
            spread = client.plan.style is SyncStyle.FULLY_ASYNC
            observed = version if reply["observed"] else None
            transfer = self.publisher.send(ids, spread=spread, observe=observed)
            failures = settle(transfer, ids) if ids else {}
        except OUTAGES as error:
            outage, failures = error, shortened(dict.fromkeys(ids, str(error)))
        finally:
            if transfer is not None:
                numbers, nbytes = [transfer.version], transfer.report.wire_bytes
                if reply["observed"]:
                    report = asdict(replace(transfer.report, version=version, failures=failures))
            told = {"ids": ids, "failures": failures, "numbers": numbers, "report": report}
            client.ask("met", step=step, version=version, **told)
        metrics = {"version": version, "bytes": nbytes, "waited": waited}
        sent = set() if transfer is None else set(transfer.workers)
        if (outage is not None or failures) and sent <= set(failures):
            why = "; ".join(f"explorer {id}: {text}" for id, text in failures.items())
            metrics.update(version=client.version, reason=why or str(outage))
        return metrics


def _tell_full(trainer: weakref.ref[ClientBase], event: WorkerEvent) -> None:
    """Tell the synchronizer of an explorer that is sent all weights of a version instead of a patch."""
    client = trainer()
    if client is not None and not client.closed.is_set():
        told = {"id": event.worker, "version": event.version, "reason": event.reason, "time": event.time}
        with contextlib.suppress(TransportError):  # the synchronizer may be away
            args = {"session": client.session, **told}
            client.channel.call("sent_all", args, client.grace, 2 * client.transfer_timeout)


class DirectService(Service):
    """The synchronizer's part: trainer and explorers meet here before a transfer."""

    calls = (*Service.calls, "meet", "sent_all", "met")

    def _take_endpoint(self, endpoint: Endpoint | None) -> None:
        trainer = self.machine.trainer
        unused = trainer is not None and trainer.synced_at is None
        if endpoint is not None and endpoint != self.trainer_endpoint and unused:
            # Update 0 of a publisher is what it starts with; explorers that join have it.
            self._record(endpoint, 0, self._next_version(), endpoint["step"])
        super()._take_endpoint(endpoint)

    def _version_of(self, key: str, number: int) -> tuple[int, int] | None:
        trainer = self.machine.trainer
        if trainer is not None and trainer.status is RunningStatus.STOPPED:
            recorded = [other for publisher, other in self._versions if publisher == key]
            if recorded and number > max(recorded):  # the trainer died before it could report this update
                remember(self._versions, (key, number), (self._next_version(), trainer.step))
        return super()._version_of(key, number)

    def meet(self, session: str, step: int, timeout: float) -> Reply:
        """Wait for the explorers that are to get weights now.

        Return their ``ids`` and the ``version`` that the weights will have; or the newest ``version`` and the
        ``reason`` for which there is no transfer.
        """
        machine, deadline = self.machine, deadline_of(timeout)
        with self.changed:
            trainer = self._trainer(session, step)
            if self.plan.style is SyncStyle.FULLY_ASYNC:
                ids = machine.ready()
            else:
                machine.trainer_requires()
                self.wait_for(lambda: bool(machine.may_transfer()) or has_ended(trainer), deadline)
                ids = () if has_ended(trainer) else machine.may_transfer(late=True)
                if not ids and not has_ended(trainer):
                    machine.trainer_gave_up(f"no explorer was ready within {format_seconds(timeout)}")
                if not ids and trainer.outcome is not None:
                    why = [f"explorer {e.id}: {e.failure}" for e in machine.explorers.values() if e.failure]
                    reason = "; ".join([str(trainer.outcome.reason), *why])
                    return {"version": machine.newest, "reason": reason}
            if ids:
                machine.begin(ids)
            observed = bool(self.observers.functions)
            return {"ids": list(ids), "version": self._next_version(), "observed": observed}

    def sent_all(self, session: str, id: int, version: int, reason: str, time: float) -> Reply:
        """Tell observers of an explorer that the trainer sends all weights instead of a patch."""
        self.beat(session)
        self.observers.tell(WorkerEvent("full_update", id, version, reason, time))
        return {}

    def met(
        self,
        session: str,
        step: int,
        version: int,
        numbers: list[int],
        ids: list[int],
        failures: Reply,
        report: Reply | None = None,
    ) -> Reply:
        """Note how a transfer to the explorers ``ids`` ended.

        ``version`` is the one that :meth:`meet` returned, ``numbers`` are those of the updates that carried
        it, and ``failures`` are the reasons of the explorers that do not have it, by id. ``report`` is for
        observers.
        """
        with self.changed:
            self._trainer(session, step)
            self._tell(report)
            endpoint, machine = self.trainer_endpoint, self.machine
            assert endpoint is not None
            for number in numbers:
                self._record(endpoint, number, version, step)
            if set(ids) - {int(id) for id in failures}:
                self.machine.published(version, step)
            if self.plan.style is SyncStyle.FULLY_ASYNC:
                machine.offered(step, version if numbers else None)
            self._end_transfer(ids, version, {int(id): why for id, why in failures.items()})
            machine.transferred()
            return {"version": machine.newest}

    def explorer_syncs(self, session: str, step: int, held: Held, timeout: float, again: bool) -> Reply:
        deadline = deadline_of(timeout)
        with self.changed:
            explorer = self._explorer(session, step, held)
            if self.trainer_endpoint is None and not self._await_trainer(explorer, deadline):
                self.member(session)  # raises if the client left meanwhile
                withdrawn = explorer.outcome is None
                return self.explorer_gives_up(session, "it went on") if withdrawn else outcome_of(explorer)
            endpoint = self.trainer_endpoint
            if endpoint is not None and explorer.linked != key_of(endpoint):
                return {"join": endpoint}
            self.machine.explorer_requires(explorer.id)
            self._await_turn(explorer, deadline, timeout, lambda: False)
            return outcome_of(explorer)

    def _await_trainer(self, explorer: ExplorerState, deadline: float | None) -> bool:
        """Wait, as one that announced its wish, for a trainer to connect to; return False if it gave up."""
        announced = explorer.status is RunningStatus.REQUIRE_SYNC
        self.machine.explorer_announces(explorer.id)
        self.wait_for(lambda: self.trainer_endpoint is not None or has_ended(explorer), deadline)
        if has_ended(explorer):
            return False
        if self.trainer_endpoint is not None and not announced:
            self.machine.explorer_withdraws(explorer.id)  # it has to connect before it may wait
        return True
