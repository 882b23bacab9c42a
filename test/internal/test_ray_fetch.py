"""Payloads that a worker fetches through Ray's object store, with a stand-in for Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from weight_update.errors import LinkClosedError
from weight_update.transports.host_name import this_host
from weight_update.transports.ray import connection, rendezvous, transport
from weight_update.wire.frames import Kind, WeightChunk

NBYTES = 1 << 20


class RayError(Exception): ...


def test_the_time_for_a_payload_grows_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """One megabyte at the least rate arrives a second later than an empty payload may."""
    payload = torch.arange(NBYTES, dtype=torch.uint8)
    needed = 60.0 + NBYTES / 1e6

    def get(ref: np.ndarray, timeout: float) -> np.ndarray:
        if timeout < needed:
            raise RayError("it is still on its way")
        return ref

    chunk = connection_with(payload, get, monkeypatch).recv(1.0, None)
    assert chunk is not None
    assert torch.equal(chunk.payload, payload)


def connection_with(
    payload: torch.Tensor, get: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> connection.RayConnection:
    """Return a connection to which a payload was sent; ``get`` stands for ``ray.get``."""
    exceptions = SimpleNamespace(RayError=RayError)
    ray = SimpleNamespace(get=get, exceptions=exceptions, is_initialized=lambda: True)
    monkeypatch.setattr(rendezvous, "import_ray", lambda: ray)
    link = connection.RayConnection(MagicMock(), "name", 0, local=False)
    head = WeightChunk(Kind.GOODBYE, {}, payload).encode_head(checksum=True)
    link._messages.append((connection._PREFIX.pack(connection._FRAME, len(head)) + head, [payload.numpy()]))
    return link


def test_any_error_of_ray_loses_the_connection_and_the_other_end_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker joins again; any other error would end it."""

    class RaySystemError(RayError): ...

    def get(ref: np.ndarray, timeout: float) -> np.ndarray:
        raise RaySystemError("the object cannot be read")

    told: list[bytes] = []
    link = connection_with(torch.zeros(NBYTES, dtype=torch.uint8), get, monkeypatch)
    monkeypatch.setattr(link, "_send_message", lambda message, refs: told.append(message))
    with pytest.raises(LinkClosedError, match=r"lost an update .the object cannot be read"):
        link.recv(1.0, None)
    assert told == [connection._PREFIX.pack(connection._LOST, 0)]


def test_an_actor_that_does_not_answer_is_not_called_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends ask the actor, the sender as well."""

    def get(call: object, timeout: float | None) -> None:
        raise RayError("The actor died unexpectedly.")

    errors = SimpleNamespace(RayError=RayError)
    ray = SimpleNamespace(get=get, exceptions=errors, is_initialized=lambda: True)
    monkeypatch.setattr(rendezvous, "import_ray", lambda: ray)
    with pytest.raises(LinkClosedError, match=r"^the named actor of .* does not answer .The actor died"):
        rendezvous.ask(object(), None)


def test_a_sender_of_this_host_whose_socket_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actor told where it listens: address= of the scheme has nothing to do with it."""
    monkeypatch.setattr(transport, "look_up", lambda *_: (this_host(), "\0weight_update-nobody"))
    link = transport.RayTransport(lambda _: object())
    with contextlib.closing(link), pytest.raises(LinkClosedError, match="no sender at") as caught:
        link.connect(1.0)
    assert "another network namespace: then give it and this worker different host=" in str(caught.value)
    assert "address=" not in str(caught.value)
