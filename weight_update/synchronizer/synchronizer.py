"""The Synchronizer that users create."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from weight_update.arguments import require_local_path, require_reachable, require_seconds
from weight_update.errors import Closing, LifecycleError, close_all, undo_on_error
from weight_update.report import Observer
from weight_update.sender.observers import Observers
from weight_update.strategy.strategy import WeightStrategy, resolve_strategy
from weight_update.synchronizer.checkpoint import CheckpointService
from weight_update.synchronizer.direct import DirectService
from weight_update.synchronizer.memory import MemoryService, require_all_at_first
from weight_update.synchronizer.plan import SyncMethod, SyncPlan, SyncStyle
from weight_update.synchronizer.ray_actor import RayHost
from weight_update.synchronizer.rpc import Server
from weight_update.synchronizer.service import Service
from weight_update.synchronizer.sessions import VersionFile
from weight_update.synchronizer.transfer import is_loopback, require_no_pipeline


class Synchronizer(Closing):
    """Object that decides when a trainer and its explorers synchronize; one for each run.

    Threads of this process create their clients with it: ``TrainerClient(synchronizer, model)``,
    ``ExplorerClient(synchronizer, model)``. :meth:`serve` admits clients of other processes. With Ray, the
    synchronizer may run in an actor; see :meth:`as_ray_actor`.

    With a ``directory``, a restarted synchronizer continues after the last published version. Clients
    reconnect automatically if it has the same address and token. With MEMORY, a restart loses the weights
    that the synchronizer held; it then asks the trainer for its current weights.

    Args:
        plan: a :class:`SyncPlan`; or a :class:`SyncMethod` (or its name), with the other fields of the plan
            as ``style``, ``sync_interval``, ``sync_offset`` and ``max_staleness``.
        directory: directory in which the number of the newest version is stored. CHECKPOINT needs a directory
            that trainer and explorers share, and stores its files there. A relative path is relative to the
            working directory of the process that creates the synchronizer, for all clients.
        strategy: MEMORY: the strategy with which the synchronizer sends weights to explorers; the same as the
            trainer's. See :class:`~weight_update.WeightStrategy`.
        lease: seconds without a message after which a client counts as gone: its process or machine has
            stopped, or the thread that last used the client has ended without closing it.
        transfer_timeout: seconds that a transfer may take.

    Raises:
        ValueError: as :class:`SyncPlan`; or CHECKPOINT without a directory; or the directory is a file or a
            URL; or MEMORY with a strategy that keeps no weights, or sends only changes at first.
    """

    def __init__(
        self,
        plan: SyncPlan | SyncMethod | str,
        style: SyncStyle | str | None = None,
        *,
        sync_interval: int | None = None,
        sync_offset: int | None = None,
        max_staleness: int | None = None,
        directory: str | os.PathLike[str] | None = None,
        strategy: str | WeightStrategy = "tensordict",
        lease: float = 30.0,
        transfer_timeout: float = 60.0,
    ) -> None:
        fields: dict[str, Any] = {
            "style": style,
            "sync_interval": sync_interval,
            "sync_offset": sync_offset,
            "max_staleness": max_staleness,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        if isinstance(plan, SyncPlan) and given:
            raise ValueError(f"give a SyncPlan or its fields, not both: {', '.join(given)}")
        self.plan: SyncPlan = plan if isinstance(plan, SyncPlan) else SyncPlan(SyncMethod(plan), **given)
        if directory is not None:
            require_local_path(directory)
        # Clients in other processes have other working directories.
        self._directory = None if directory is None else str(Path(directory).absolute())
        self._options: dict[str, Any] = {
            "lease": require_seconds("lease", lease),
            "transfer_timeout": require_seconds("transfer_timeout", transfer_timeout),
            "strategy": resolve_strategy(strategy),
        }
        if self.plan.method is SyncMethod.MEMORY:
            require_no_pipeline(self._options["strategy"])
            require_all_at_first(self._options["strategy"])
        if self.plan.method is SyncMethod.CHECKPOINT and directory is None:
            raise ValueError("SyncMethod.CHECKPOINT needs directory=, one that trainer and explorers share")
        if self._directory is not None and os.path.isfile(self._directory):
            raise ValueError(f"directory={str(directory)!r} is a file; give a directory")
        self._service: Service | None = None
        self._servers: list[Server | RayHost] = []
        self._closed = False
        self._making = threading.RLock()  # a signal handler may call close() while it is held
        self._observers = Observers()
        weakref.finalize(self, self._observers.close)

    @property
    def service(self) -> Service:
        """The service that answers calls; made when it is first needed."""
        with self._making:  # clients may be made by several threads at once
            self._require_open()
            if self._in_actor:
                raise LifecycleError(
                    "this synchronizer runs in a Ray actor; give clients what as_ray_actor() returned, or "
                    "its address"
                )
            if self._service is None:
                service = self._make_service()
                service.observers = self._observers
                self._require_open()  # a signal handler may have called close()
                self._service = service
            return self._service

    def _require_open(self) -> None:
        if self._closed:
            raise LifecycleError("this synchronizer is closed; create a new one")

    @property
    def _in_actor(self) -> bool:
        return any(isinstance(server, RayHost) for server in self._servers)

    def _make_service(self) -> Service:
        plan, directory, strategy = self.plan, self._directory, self._options["strategy"]
        options = {"lease": self._options["lease"], "timeout": self._options["transfer_timeout"]}
        if plan.method is SyncMethod.CHECKPOINT:
            return CheckpointService(plan, str(directory), **options)
        file = None if directory is None else VersionFile(directory)
        if plan.method is SyncMethod.MEMORY:
            return MemoryService(plan, strategy, version_file=file, **options)
        return DirectService(plan, version_file=file, **options)

    def serve(self, address: str = "127.0.0.1", port: int = 0, token: str | None = None) -> Server:
        """Admit clients of other processes, on this machine or on others.

        Args:
            address: address at which other machines reach this one. The default, loopback, admits only
                processes of this machine.
            port: port to listen on; 0 takes a free one.
            token: secret that clients must show; None takes the environment's ``WEIGHT_UPDATE_TOKEN``, or
                makes one. To restart a synchronizer, pass the same port and token.

        Returns:
            the server; its ``address`` and ``token`` are for clients:
            ``ExplorerClient(server.address, model, token=server.token)``.

        Raises:
            ValueError: the address stands for all interfaces, as 0.0.0.0 does; no client could connect to it.
            LifecycleError: weights are already sent on an interface that only this machine reaches, or this
                synchronizer is closed.
            OSError: the address is not of this machine, or the port is taken.
        """
        require_reachable(address)
        server = Server(self.service, address, port, token)
        with undo_on_error(server.close):
            self.reach_by(address)
            self._servers.append(server)
            self._require_open()  # close() may not have seen the server
        return server

    def add_observer(self, observer: Observer) -> Callable[[], None]:
        """Call a function for every later published version and every later change of an explorer.

        A separate thread calls it. It gets a :class:`~weight_update.SyncReport` for each version that the
        trainer publishes, and a :class:`~weight_update.WorkerEvent` for each explorer that joins, leaves, is
        lost, is late, is sent all weights instead of a patch, or applies a version. An explorer's id is the
        index of the worker, and versions are those of the clients. An error that the function raises is
        logged.

        Returns:
            a function that removes the observer.

        Raises:
            LifecycleError: this synchronizer is closed, or runs in a Ray actor.
        """
        if self._in_actor:
            raise LifecycleError(
                "this synchronizer runs in a Ray actor, which cannot call functions of this process; make "
                "another one, and serve() that from this process, to observe it"
            )
        return self._observers.add(observer)

    def as_ray_actor(self, name: str, namespace: str | None = None, **options: Any) -> RayHost:
        """Start an actor that runs this synchronizer; this object then serves no clients itself.

        The actor ends with this program, or when nothing refers to this object or the host any more. With
        ``lifetime="detached"``, it runs until ``host.close()``, or until ``ray.kill`` ends it.

        Args:
            name: name of the actor, without ``/``.
            namespace: Ray namespace of the actor; None takes that of this process.
            options: Ray options of the actor, such as ``max_restarts``.

        Returns:
            the host; its ``address``, for clients, is ``"ray:<name>"`` or ``"ray:<namespace>/<name>"``.

        Raises:
            ImportError: Ray is not installed.
            ValueError: the name is empty, or has a ``/``, with which the namespace ends in the address.
            SyncTimeoutError: the actor did not start in 300 s.
            LifecycleError: this synchronizer is closed, serves clients already, or has observers.
        """
        self._require_open()
        if self._service is not None or self._in_actor:
            raise LifecycleError("this synchronizer already serves clients; create another one for an actor")
        if self._observers.functions:
            raise LifecycleError("a synchronizer in a Ray actor has no observers; remove them, or serve() it")
        make = functools.partial(type(self), self.plan, directory=self._directory, **self._options)
        host = RayHost(make, name, namespace, options)
        self._servers.append(host)
        return host

    def reach_by(self, address: str) -> None:
        """Send weights on the interface of ``address``, too, if explorers of other machines reach it."""
        service = self.service
        if not is_loopback(address):
            service.reach_by(address)

    def close(self) -> None:
        """Wake all clients that wait, and end. It may be called twice."""
        with self._making:
            self._closed = True
        close_all(self._service, *reversed(self._servers), self._observers)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Synchronizer stays in its process; give clients in other processes the address and the token "
            "of the server that serve() returns"
        )
