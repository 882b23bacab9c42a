"""Calls of vLLM's control plane: a server's HTTP routes, and the methods of an ``LLM``."""

from __future__ import annotations

import contextlib
import functools
import urllib.parse
from collections.abc import Callable
from typing import Any, TypeVar

from weight_update.arguments import require_seconds
from weight_update.engines.http import call, not_a_server
from weight_update.errors import undo_on_error
from weight_update.schemes.base import WeightSyncScheme
from weight_update.serving.vllm.joining import PauseMode, connect_with, init_info

_T = TypeVar("_T")


class VLLMServer:
    """Client for the routes of a ``vllm serve`` that was started with ``VLLM_SERVER_DEV_MODE=1``.

    It has the methods of vLLM's ``VLLMWeightSyncClient``, so vLLM's ``TrainerWeightTransferEngine`` accepts
    it. The trainer's environment needs no vLLM. Source: ``vllm/entrypoints/rl/online/api_router.py`` and
    ``vllm/entrypoints/serve/dev/cache/api_router.py`` of vLLM 0.33.

    Args:
        url: such as ``"http://10.0.0.6:8000"``.
        timeout: seconds that each call may take.

    Raises:
        ValueError: ``timeout`` is not a time to wait.
        RuntimeError: from all methods: the server answered with an error.
        TransportError: from all methods: no server answers.
        SyncTimeoutError: from all methods: the server took longer than ``timeout``.
    """

    def __init__(self, url: str, timeout: float = 300.0) -> None:
        self.url, self.timeout = url.rstrip("/"), require_seconds("timeout", timeout)

    def world_size(self) -> int:
        """Return the number of the server's workers, over all of its replicas (data parallel)."""
        return self._field("GET", "get_world_size", "world_size", int)

    def weight_version(self) -> str:
        """Return the version that the server was told last; ``"default"`` before."""
        return self._field("GET", "weight_info", "weight_version", str)

    def update_weight_version(self, new_version: str) -> None:
        """Have the server state another version, without an update."""
        self._call("POST", "update_weight_version", {"new_version": new_version})

    def pause(self, mode: PauseMode = "wait") -> None:
        """Pause generation; ``"abort"`` and ``"wait"`` also drop all cached prefixes."""
        self._call("POST", f"pause?{urllib.parse.urlencode({'mode': mode})}")

    def resume(self) -> None:
        """Continue generation."""
        self._call("POST", "resume")

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; return False if running requests use some of them."""
        return self._field("POST", "reset_prefix_cache", "success", bool)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Make the server's workers join a sender."""
        self._call("POST", "init_weight_transfer_engine", {"init_info": init_info})

    def shutdown_weight_transfer_engine(self) -> None:
        """Make the server's workers leave their sender."""
        self._call("POST", "shutdown_weight_transfer_engine")

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._call("POST", "start_weight_update")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Make all workers load the version of ``update_info``, between two steps."""
        self._call("POST", "update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update, after which the server states ``weight_version``."""
        body = None if weight_version is None else {"weight_version": weight_version}
        self._call("POST", "finish_weight_update", body)

    def _field(self, method: str, route: str, field: str, kind: Callable[[Any], _T]) -> _T:
        try:
            return kind(self._call(method, route)[field])
        except (LookupError, TypeError, ValueError):
            raise not_a_server(f"{self.url}/{route}", "vLLM") from None

    def _call(self, method: str, route: str, body: dict[str, Any] | None = None) -> Any:
        return call(method, f"{self.url}/{route}", body, self.timeout, engine="vLLM", remedy=_remedy)


def _remedy(status: int) -> str:
    return "start vLLM with VLLM_SERVER_DEV_MODE=1; " if status == 404 else ""


class LocalLLM:
    """Adapter that calls a ``vllm.LLM`` of this process as :class:`VLLMServer` calls a server.

    Call it from the thread that calls ``generate``, and not during ``generate``. Source:
    ``vllm/entrypoints/rl/offline.py`` of vLLM 0.33.

    Args:
        llm: the ``vllm.LLM``, made with ``weight_transfer_config``.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Make the workers join a sender, and load its weights."""
        self.llm.init_weight_transfer_engine({"init_info": init_info})
        self.llm.reset_prefix_cache()

    def start_weight_update(self) -> None:
        """Begin an update."""
        self.llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Make all workers load the version of ``update_info``."""
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update, after which answers state ``weight_version``, and drop cached prefixes.

        Raises:
            RuntimeError: vLLM did not drop them; requests are running.
        """
        self.llm.finish_weight_update(weight_version)
        if self.llm.reset_prefix_cache() is False:
            raise RuntimeError(
                "vLLM did not reset its prefix cache; is generate() running in another thread?"
            )

    def update(self, version: int | None = None, timeout: float = 60.0) -> None:
        """Load a version that the trainer has sent, and drop cached prefixes.

        Args:
            version: number of the version. None takes the next one; it needs a model of a single worker.
            timeout: seconds to wait for it.
        """
        update_in_session(self, version, timeout)


def update_in_session(client: Any, version: int | None, timeout: float | None = None) -> None:
    """Call a client's ``start_weight_update``, ``update_weights`` and ``finish_weight_update``.

    If one of the first two fails, the third is called, too: vLLM would else refuse the next update. This also
    ends a session that an earlier trainer left open.
    """
    info = {"version": version, "timeout": timeout}
    with undo_on_error(lambda: end_session(client)):
        client.start_weight_update()
        client.update_weights({key: value for key, value in info.items() if value is not None})
    client.finish_weight_update(None if version is None else str(version))


def end_session(client: Any) -> None:
    """End a session in which loading failed; workers whose session ended with their error raise again."""
    with contextlib.suppress(Exception):
        client.finish_weight_update()


def connect_servers(
    scheme: WeightSyncScheme,
    *servers: VLLMServer,
    pause: PauseMode = "wait",
    in_chunks: bool = False,
    first_worker: int = 0,
) -> None:
    """Connect a sender with all workers of vLLM servers; ``scheme.send()`` alone updates them from then on.

    ::

        server = VLLMServer("http://10.0.0.6:8000")
        scheme.init_on_sender(model=policy, num_workers=server.world_size())
        connect_servers(scheme, server)
        ...
        scheme.send()

    For each update, the worker of rank 0 of each server calls its server: ``/pause``, the three calls of an
    update, and ``/resume``. If an update fails, the server stays paused until an update succeeds. If this
    function raises, servers of this call may also stay paused: call it again, or ``server.resume()`` if the
    server's weights may be used.

    If a server was restarted, or is added, call this function on the connected ``scheme`` with only that
    server, and with the ``first_worker`` of its workers. Send nothing before it returns, because it
    resumes the server, also in the middle of an update.

    Args:
        scheme: the sender, after ``init_on_sender``.
        servers: the servers; their workers get consecutive indices in this order.
        pause: mode of ``/pause``. ``"keep"`` keeps running requests, and caches that were computed with other
            weights.
        in_chunks: whether weights are loaded while their version arrives.
        first_worker: index of the first worker of the first server.

    Raises:
        ValueError: no server was given.
        TypeError: a server is not a :class:`VLLMServer`.
        RuntimeError: a server refused, or its workers could not join.
        TransportError: no server answers.
        SyncTimeoutError, SchemaMismatchError: as :meth:`~weight_update.WeightSyncScheme.connect`.
    """
    if not servers:
        raise ValueError("no server; give connect_servers(scheme, VLLMServer(url))")
    for server in servers:
        if not isinstance(server, VLLMServer):
            raise TypeError(f"give VLLMServer(url), not {server!r}")
    calls = []
    for server in servers:
        info = init_info(
            scheme, first_worker=first_worker, in_chunks=in_chunks, control=server.url, pause=pause
        )
        first_worker += server.world_size()
        calls.append(functools.partial(_init, server, info, pause))
    connect_with(scheme, calls)
    assert scheme.last_report is not None
    for server in servers:
        server.update_weight_version(str(scheme.last_report.version))
        server.resume()


def _init(server: VLLMServer, info: dict[str, Any], pause: PauseMode) -> None:
    server.pause(pause)
    server.init_weight_transfer_engine(info)
