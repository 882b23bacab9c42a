"""Calls of the HTTP routes of inference servers."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from weight_update.errors import SyncTimeoutError, TransportError
from weight_update.threads import call_in_thread

_T = TypeVar("_T")


class _Direct(urllib.request.HTTPRedirectHandler):
    """Answers that redirect are errors: urllib would turn a POST into a GET, and pass the key on."""

    def redirect_request(self, *args: Any) -> None:
        """Follow no redirect."""


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Direct)  # servers of this job


def call(
    method: str,
    url: str,
    body: Any,
    timeout: float,
    *,
    engine: str,
    key: str | None = None,
    remedy: Callable[[int], str],
) -> Any:
    """Call a route of a server with ``body`` as JSON, if there is one; return its answer.

    The answer is what its JSON says. A POST may also be answered with a text.

    Raises:
        RuntimeError: the server refuses, or reports a failure; the message has ``remedy(status)``. Or its
            answer to a GET is not JSON, so that it is no server of ``engine``.
        TransportError: no server answers.
        SyncTimeoutError: the server takes longer than ``timeout`` seconds.
        ValueError: ``key`` has characters that no HTTP header may have.
    """
    headers = {"Content-Type": "application/json"}
    if key is not None:
        if not (key.isascii() and key.isprintable()):
            raise ValueError(
                "the key has a line break or another control character, or one that is not ASCII; strip() "
                "removes a line break at its end"
            )
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    deadline = time.monotonic() + timeout
    try:
        request = urllib.request.Request(url, data, headers, method=method)
        content = _in_time(deadline, lambda: _read(_OPENER.open(request, timeout=timeout), deadline))
    except urllib.error.HTTPError as error:
        try:
            text = _in_time(deadline, _read, error, deadline).decode(errors="replace")
        except (OSError, http.client.HTTPException):  # the status says more than this
            text = "(the rest of the answer is missing)"
        elsewhere = f"to {error.headers['Location']}; give the URL of the server itself; "
        cure = elsewhere if 300 <= error.code < 400 else remedy(error.code)
        raise RuntimeError(f"{url} answered {error.code}: {cure}{text}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: of the URL
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise SyncTimeoutError(f"{url} took longer than {timeout:g} s (raise timeout=)") from error
        raise TransportError(
            f"no {engine} server answers at {url} ({reason}); start it, or give a URL such as http://host:8000"
        ) from error
    try:
        return json.loads(content or b"null")
    except ValueError:
        if method == "POST":
            return content.decode(errors="replace")
        raise not_a_server(url, engine) from None


def _in_time(deadline: float, work: Callable[..., _T], *args: Any) -> _T:
    """Return ``work(*args)``; the socket's timeout alone allows an answer in small pieces without end.

    Raises:
        TimeoutError: it takes longer than until ``deadline``, a time of the monotonic clock.
    """
    try:
        return call_in_thread("weight_update-http", work, *args).result(max(deadline - time.monotonic(), 0.0))
    except FutureTimeout:
        raise TimeoutError from None


def _read(response: Any, deadline: float) -> bytes:
    """Return the content.

    Raises:
        TimeoutError: some of it came after ``deadline``.
        IncompleteRead: the server closed the connection before the end.
    """
    content = b""
    with response:
        while piece := response.read1(1 << 16):
            if time.monotonic() > deadline:
                raise TimeoutError
            content += piece
        if response.length:
            raise http.client.IncompleteRead(content, response.length)
    return content


def not_a_server(url: str, engine: str) -> RuntimeError:
    """Return the error for an answer that no server of ``engine`` gives."""
    return RuntimeError(f"{url} answered, but is not {engine}; correct the URL")
