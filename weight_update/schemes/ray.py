"""Ray: workers that are actors."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Sequence
from typing import Any

from typing_extensions import Unpack

from weight_update.errors import LifecycleError, SyncFailedError
from weight_update.schemes.base import End
from weight_update.schemes.options import RemoteOptions, SenderOptions, takes_options_of
from weight_update.schemes.remote import RemoteWeightSyncScheme, Whereabouts
from weight_update.schemes.sender_side import SenderSide
from weight_update.strategy.strategy import WeightStrategy
from weight_update.transports.base import TransportBackend
from weight_update.transports.host_name import this_host
from weight_update.transports.ray.actors import ActorWatch
from weight_update.transports.ray.object_store import RayObjectStore
from weight_update.transports.ray.rendezvous import (
    call,
    find_rendezvous,
    look_up,
    require_ray,
    start_rendezvous,
    stop_rendezvous,
)
from weight_update.transports.ray.transport import RayListener, RayTransport


class RayWeightSyncScheme(RemoteWeightSyncScheme, backend="ray"):
    """Scheme whose workers are Ray actors, on any node. Ray must run in each process.

    Call ``ray.init()`` in a process that is not an actor. Both sides find each other through a small named
    actor that the sender starts. It reserves no CPU, and ends with ``shutdown()`` or the sender's process.
    Pass the scheme to actors before or after ``init_on_sender``, for example as an argument of their
    constructor. An update calls no method of an actor: a busy actor takes it between its forward passes.

    All other arguments are those of :class:`RemoteWeightSyncScheme`.

    Args:
        data: ``"torch"``: weights travel as in :class:`DistributedWeightSyncScheme`, so workers on other
            nodes must reach ``address``; they can reach ``ray.util.get_node_ip_address()``.
            ``"object_store"``: no port is opened, for clusters whose actors cannot reach each other's ports.
            Workers on the sender's host map its memory, as with ``"torch"``. Everything for workers on other
            hosts travels through Ray, which costs one copy into the object store for each update, one
            transfer to each node, and one copy out of the store for each worker.
        name: name of that actor. Schemes created in different jobs need the same name, the same ``namespace``
            and the same ``token``.
        namespace: Ray namespace of that actor; None is the namespace of the job.

    Attributes:
        actors: handles of the actors by worker index, if they are known. With them, errors name the actor
            that died, and the cause. If an actor replaces another one, put its handle here.

    Raises:
        ValueError: the backend or ``data`` is unknown.
    """

    @takes_options_of(RemoteWeightSyncScheme.__init__)
    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        backend: str = "gloo",
        sync: bool = True,
        *,
        data: str = "torch",
        name: str | None = None,
        namespace: str | None = None,
        **options: Unpack[RemoteOptions],
    ) -> None:
        if data not in ("torch", "object_store"):
            raise ValueError(f"unknown data={data!r} (known: 'torch', 'object_store')")
        super().__init__(strategy, backend, sync, **options)
        self.data, self.namespace = data, namespace
        # the whole cluster sees the name, so it must not contain the token
        self.name: str = name or f"weight_update-{hashlib.sha256(self.token.encode()).hexdigest()[:12]}"

    def _reset(self) -> None:
        super()._reset()
        self.actors: dict[int, Any] = {}
        self._watch = ActorWatch(self.actors)
        self._rendezvous: Any = None
        self._object_store = RayObjectStore()

    @takes_options_of(RemoteWeightSyncScheme.init_on_sender)
    def init_on_sender(
        self, *, remote_collectors: Sequence[Any] | None = None, **options: Unpack[SenderOptions]
    ) -> None:
        """Prepare the sender, as :meth:`WeightSyncScheme.init_on_sender` does, with one more argument.

        ``remote_collectors`` are the handles of the actors that are the workers, in the order of their
        indices; they replace ``num_workers``. A ``context`` may be given in addition to ``model`` or
        ``weights``, as collectors do.

        Raises:
            ImportError: Ray is not installed.
            TypeError: ``remote_collectors`` is not a list of handles of actors.
            LifecycleError: Ray does not run in this process, or the scheme is initialized already.
            ValueError: see :class:`WeightSyncScheme`.
        """
        require_ray()
        if remote_collectors is not None:
            _require_actors(remote_collectors, options.get("num_workers"))
            options["num_workers"] = len(remote_collectors)
            self.actors.update(enumerate(remote_collectors))
        context = options.get("context")
        if options.get("model") is not None or options.get("weights") is not None:
            options["context"] = None
        super().init_on_sender(**options)
        self.context = context
        if self.actors:
            self.worker_alive = self._watch.alive

    def open_sender(self, workers: Sequence[int], ctx: Any) -> dict[int, TransportBackend]:
        self.namespace = self.namespace or require_ray().get_runtime_context().namespace
        self._rendezvous = start_rendezvous(self.name, self.namespace)
        # from the actor, workers learn of the end
        self._process.undo.callback(stop_rendezvous, self._rendezvous)
        if self.data == "torch":
            return super().open_sender(workers, ctx)
        links: dict[int, Any] = {idx: self._transport_of(idx, "sender") for idx in workers}
        host = self.host_name() or this_host()
        self.listener = RayListener(self._rendezvous, host, self.token, links, self.late_joiner_links())
        return links

    def announce(self, where: Whereabouts) -> None:
        """Announce the address of the sender at the actor. The token travels with the scheme, not here."""
        node = require_ray().util.get_node_ip_address()
        call(self._rendezvous.announce, "torch", (where.address, where.port, node))

    def look_up(self, timeout: float) -> Whereabouts:
        deadline = time.monotonic() + timeout
        actor = self._find_rendezvous(timeout)
        address, port, node = look_up(actor, "torch", max(deadline - time.monotonic(), 0.0))
        here = require_ray().util.get_node_ip_address()
        if address.startswith("127.") and node != here:
            raise LifecycleError(
                f"the sender on {node} listens on {address}, which cannot be reached from {here}: make the "
                f"scheme with address={node!r}, or with data='object_store'"
            )
        return Whereabouts(address, port, self.token)

    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        link: Any
        if self.data == "torch":
            link = super().create_transport(worker_idx=worker_idx, end=end)
        else:
            find = None if end == "sender" else self._find_rendezvous
            link = RayTransport(
                find, self._object_store, token=self.token, host=self.host_name(), directory=self.directory
            )
        if end == "sender":
            link.explain = functools.partial(self._watch.named, worker_idx)
        return link  # type: ignore[no-any-return]

    def _find_sender(self, timeout: float) -> None:
        if self.data == "torch":
            super()._find_sender(timeout)

    def _find_rendezvous(self, timeout: float | None) -> Any:
        limit = self.connect_timeout if timeout is None else timeout
        return find_rendezvous(self.name, self.namespace, limit, self._process.require_open)

    def _connect_sender(self, side: SenderSide, weights: Any, limit: float) -> None:
        try:
            super()._connect_sender(side, weights, limit)
        except SyncFailedError as error:
            raise self._watch.all_named(error) from None


def _require_actors(given: Any, num_workers: int | None) -> None:
    """Raise TypeError unless ``given`` is a list of handles of actors; ValueError for another number."""
    listed = isinstance(given, Sequence)
    if listed and num_workers not in (None, len(given)):
        raise ValueError(f"{num_workers=}, but {len(given)} remote_collectors")
    odd = [one for one in given if not hasattr(one, "_actor_id")] if listed else [given]
    if odd:
        raise TypeError(
            "remote_collectors is a list of handles of actors, [MyActor.remote(), ...], got "
            f"{odd[0]!r:.60}{' in it' if listed else ''}"
        )
