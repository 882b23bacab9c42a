"""A synchronizer in a Ray actor."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from weight_update.errors import LinkClosedError, SyncTimeoutError, undo_on_error
from weight_update.synchronizer.rpc import Channel
from weight_update.synchronizer.sessions import Reply
from weight_update.transports.ray.rendezvous import (
    ask,
    call,
    is_done,
    kill,
    named_actor,
    ray_runs,
    require_ray,
    result_of,
)

_THREADS = 1000  # each client that waits occupies a thread
_START_SECONDS, _CLOSE_SECONDS = 300.0, 10.0


class RayHost:
    """A handle of an actor that serves clients of any machine of the cluster; making one starts the actor.

    The synchronizer is the one that ``make`` returns there. Other arguments are those of
    :meth:`~weight_update.Synchronizer.as_ray_actor`.

    Attributes:
        address: ``"ray:<name>"`` or ``"ray:<namespace>/<name>"``, for clients.
    """

    def __init__(
        self, make: Callable[[], Any], name: str, namespace: str | None, options: dict[str, Any]
    ) -> None:
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(
                f"name is a text without '/', such as 'sync', not {name!r}; give a namespace as namespace="
            )
        ray = require_ray()
        settings = {"num_cpus": 0, **options, "max_concurrency": _THREADS}
        named = ray.remote(_SynchronizerActor).options(**settings, name=name, namespace=namespace)
        self._actor = named.remote(make)
        with undo_on_error(lambda: ray.kill(self._actor)):  # its name is free again
            try:
                ray.get(self._actor.ready.remote(), timeout=_START_SECONDS)
            except ray.exceptions.GetTimeoutError:
                raise SyncTimeoutError(
                    f"the actor {name!r} did not start in {_START_SECONDS:g} s; does the cluster have what "
                    "its options ask for?"
                ) from None
        self.address: str = f"ray:{name}" if namespace is None else f"ray:{namespace}/{name}"

    def close(self) -> None:
        """End the actor."""
        with contextlib.suppress(LinkClosedError):  # Ray or the actor may be gone
            ask(call(self._actor.close), _CLOSE_SECONDS)
        kill(self._actor)


class _SynchronizerActor:
    """The actor, by the name of which Ray's tools list it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._synchronizer = make()
        self._service = self._synchronizer.service
        self._synchronizer.reach_by(str(require_ray().util.get_node_ip_address()))

    def ready(self) -> bool:
        return True

    def call(self, name: str, args: dict[str, Any]) -> Reply:
        reply: Reply = self._service.call(name, args)
        return reply

    def close(self) -> None:
        self._synchronizer.close()


class RayChannel(Channel):
    """A channel to the synchronizer in the actor at ``ray:<name>`` or ``ray:<namespace>/<name>``."""

    def __init__(self, address: str) -> None:
        self._ray = require_ray()
        namespace, _, self._name = address.removeprefix("ray:").rpartition("/")
        self._namespace = namespace or None
        self._actor: Any = None
        self.address = str(self._ray.util.get_node_ip_address())

    def call(self, name: str, args: dict[str, Any], timeout: float, longer: float = 0.0) -> Reply:
        last, errors = time.monotonic() + timeout + longer, self._ray.exceptions
        if not ray_runs():  # or Ray would start a new cluster, which has no such actor
            self._actor = None
            raise LinkClosedError("Ray does not run in this process any more; call ray.init() again")
        try:
            if self._actor is None:
                self._actor = named_actor(self._name, self._namespace)
            coming = call(self._actor.call, name, args)
            while not is_done(coming, timeout / 2) and time.monotonic() < last:
                result_of(call(self._actor.ready), timeout / 2)  # raises if the actor died
            reply: Reply = result_of(coming, 0)
        except (errors.RayError, ValueError) as error:
            self._actor = None
            raise LinkClosedError(f"no synchronizer answers in the actor {self._name!r} ({error})") from None
        return reply
