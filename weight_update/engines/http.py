"""Calls of the HTTP routes of inference servers."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from weight_update.errors import SyncTimeoutError, TransportError

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # servers of this job, not the web


def call(
    method: str,
    url: str,
    body: Any,
    timeout: float,
    *,
    key: str | None = None,
    remedy: Callable[[int], str] = lambda status: "",
) -> Any:
    """Call a route of a server, and return its answer; both are JSON. Without ``body``, nothing is sent.

    Raises:
        RuntimeError: the server refuses, or reports a failure; the message has ``remedy(status)``.
        TransportError: no server answers.
        SyncTimeoutError: the server takes longer than ``timeout`` seconds.
    """
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with _OPENER.open(request, timeout=timeout) as response:
            return json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode(errors="replace")
        raise RuntimeError(f"{url} answered {error.code}: {remedy(error.code)}{text}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise SyncTimeoutError(f"{url} took longer than {timeout:g} s (raise timeout=)") from error
        raise TransportError(
            f"no server answers at {url} ({reason}); start it, or correct the URL"
        ) from error
