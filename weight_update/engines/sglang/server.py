"""Adapter for SGLang's HTTP server."""

from __future__ import annotations

import base64
import contextlib
import pickle
from typing import Any, Literal

import torch

from weight_update.arguments import require_seconds
from weight_update.engines.http import call, not_a_server
from weight_update.engines.sglang.session import LOADER, SGLangCalls, SGLangEngineBase
from weight_update.errors import WeightSyncError


class SGLangServer(SGLangEngineBase):
    """Engine that loads weights into an SGLang server on this host, under Hugging Face's names.

    Run it in a process beside the server, as the same user and in the same container; clients go on sending
    requests to the server itself::

        engine = SGLangServer("http://127.0.0.1:30000")
        scheme.init_on_receiver(model=engine, worker_idx=0)
        scheme.connect()

    For each update the server is paused, gets the weights through shared memory, drops cached prefixes, has
    its ``weight_version`` set to the scheme's version, and continues. If an update fails midway, the server
    stays paused, with a mixture of weights, until an update succeeds. Source: the routes of
    ``sglang/srt/entrypoints/http_server.py``.

    Args:
        url: address of the server.
        api_key: the server's ``--api-key``, if it has one.
        admin_api_key: the server's ``--admin-api-key``, if it has one.
        pause: treatment of running requests. ``"retract"`` computes their prefix again with the new weights
            and continues, so one answer may come from several versions. ``"abort"`` ends them.
        batch_bytes: bytes of shared memory, unless the weights of one module are larger.
        loads_changes: as :attr:`~weight_update.InferenceEngine.loads_changes`.
        loads_in_chunks: as :attr:`~weight_update.InferenceEngine.loads_in_chunks`.
        timeout: seconds that one call of the server may take.

    Attributes:
        version: version of the loaded weights; None before the first, and after an update that failed.
        last_patch: as for :class:`SGLangEngine`.

    Raises:
        RuntimeError: the server was not started with our loader, refuses the key, or is not SGLang.
        TransportError: no server answers at ``url``.
        SyncTimeoutError: the server takes longer than ``timeout``.
        ValueError: ``pause`` is neither of the two, a key has characters that no HTTP header may have, or
            ``timeout`` is not a time to wait.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        pause: Literal["retract", "abort"] = "retract",
        batch_bytes: int = 256 << 20,
        loads_changes: bool = True,
        loads_in_chunks: bool = False,
        timeout: float = 60.0,
    ) -> None:
        if pause not in ("retract", "abort"):
            raise ValueError(f"pause={pause!r} is neither 'retract' nor 'abort'")
        self.loads_in_chunks: bool = loads_in_chunks
        self.version: int | None = None
        self._server = _ServerCalls(url, api_key, admin_api_key, pause, require_seconds("timeout", timeout))
        self._prepare(self._server, batch_bytes=batch_bytes, loads_changes=loads_changes)

    def begin_update(self, version: int) -> None:
        """Pause the server, and open an update; let the server continue if that fails."""
        try:
            self._server.pause()
            self._open_session()
        except BaseException:
            if self.version is not None:
                with contextlib.suppress(RuntimeError, WeightSyncError):  # the first error says more
                    self._server.post("continue_generation")
            raise

    def finish_update(self, version: int) -> None:
        """End the update, and let the server continue."""
        self._close_session(version)
        self._server.post("continue_generation")
        self.version = version

    def abort_update(self, version: int) -> None:
        """End the update; the server stays paused, because its weights are a mixture."""
        self.version = None
        self._abort_session()


class _ServerCalls(SGLangCalls):
    def __init__(
        self, url: str, api_key: str | None, admin_key: str | None, pause: str, timeout: float
    ) -> None:
        self._url, self._pause, self._timeout = url.rstrip("/"), pause, timeout
        # With both keys, SGLang's routes for updates take the second, and its other routes the first.
        self._keys = {"GET": api_key, "POST": admin_key if admin_key is not None else api_key}
        self._ranks = 1

    def info(self) -> dict[str, Any]:
        found: dict[str, Any] = self._call("GET", "server_info", None)
        try:
            self._ranks = int(found["tp_size"])
        except (LookupError, TypeError, ValueError) as error:
            raise not_a_server(self._url, "SGLang") from error
        return found

    def pause(self) -> None:
        self.post("pause_generation", mode=self._pause)

    def begin(self) -> None:
        self.post("begin_weight_update")

    def load(self, order: str) -> None:
        # One for each rank. SGLang's unpickler takes tensors, strings, lists and tuples.
        content = base64.b64encode(pickle.dumps([(order, torch.empty(0, device="cpu"))])).decode()
        named = {"serialized_named_tensors": [content] * self._ranks}
        self.post("update_weights_from_tensor", **named, load_format=LOADER, flush_cache=False)

    def end(self) -> None:
        self.post("end_weight_update")

    def flush(self) -> None:
        # With a timeout, SGLang waits until no request is left. Those that were retracted stay.
        self.post(f"flush_cache?timeout={self._timeout:g}" if self._pause == "abort" else "flush_cache")

    def set_version(self, version: int) -> None:
        self.post("update_weight_version", new_version=str(version), abort_all_requests=False)

    def post(self, route: str, **body: Any) -> None:
        """Call a route; raise as :func:`~weight_update.engines.http.call`."""
        self._call("POST", route, body)

    def _call(self, method: str, route: str, body: dict[str, Any] | None) -> Any:
        key = self._keys[method]
        url = f"{self._url}/{route}"
        return call(method, url, body, self._timeout, engine="SGLang", key=key, remedy=_remedy)


def _remedy(status: int) -> str:
    if status in (401, 403):
        return "give api_key= and admin_api_key= the keys that the server was started with; "
    if status == 404:
        return "this needs a server of SGLang 0.5.23 or newer; "
    return ""
