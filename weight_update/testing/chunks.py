"""Chunks for tests of transports, some with a spoilt frame, and functions that send and receive them."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from weight_update.errors import LinkClosedError
from weight_update.testing.models import random_bits
from weight_update.transports import TransportBackend
from weight_update.wire.frames import Kind, WeightChunk

Ends = tuple[TransportBackend, TransportBackend]
LONG = 20.0
TEXT = 'naïve 漢字 🤖 "quoted" \\ \n \x00'


def hello(token: str = "token", **header: Any) -> WeightChunk:
    """Return the HELLO of worker 0."""
    who = {"token": token, "worker": 0, "pid": os.getpid()}
    return WeightChunk(Kind.HELLO, {**who, "version": None, "schema": None, "error": None, **header})


def greet(
    sender: TransportBackend,
    receiver: TransportBackend,
    token: str = "token",
    timeout: float = LONG,
    *,
    again: bool = False,
) -> None:
    """Connect as a scheme does, or ``again``: the receiver sends its HELLO, and the sender answers."""
    mine = hello(token)
    receiver.restart(timeout)
    receiver.send_chunk(mine, timeout)
    try:
        first = must_receive(sender, timeout)
    except LinkClosedError:  # the end of the connection before
        if not again:
            raise
        first = must_receive(sender, timeout)
    assert first.header == mine.header, "the sender's end received another chunk than the worker's HELLO"
    answer = exchange(sender, receiver, number(0), timeout)
    assert answer.header == {"version": 0}, "the worker received another chunk than the answer to its HELLO"


def update_of(end: TransportBackend, size: int, seed: int = 0) -> WeightChunk:
    """Return an UPDATE chunk with a payload of random bytes in memory of ``end``."""
    payload = end.allocate(size)
    payload.tensor.copy_(random_bits((size,), torch.uint8, size + seed))
    header = {
        "version": 3,
        "schema": "0" * 64,
        "encoding": TEXT,
        "index": 0,
        "count": 1,
        "commit": True,
        "group": None,
        "base": None,
        "extra": {TEXT: {"$dict": {}}},
    }
    _kept.append(payload)  # the sender of a scheme holds its buffers as long as receivers may read them
    return WeightChunk(Kind.UPDATE, header, payload.tensor)


_kept: deque[object] = deque(maxlen=10)


def number(version: int, spoil: Callable[[bytes], bytes] = bytes) -> WeightChunk:
    """Return a chunk without a payload; ``spoil`` changes its frame."""
    return Spoilt(Kind.COMMIT, {"version": version}, spoil=spoil)


def send_all(end: TransportBackend, chunks: Sequence[WeightChunk], timeout: float | None) -> None:
    """Send ``chunks``, one after the other."""
    for chunk in chunks:
        end.send_chunk(chunk, timeout)


def send_unread(
    end: TransportBackend,
    count: int,
    timeout: float | None,
    seconds: list[float],
    errors: list[BaseException],
) -> None:
    """Send numbered chunks of 32 KiB until one fails; note how long each took, and the error."""
    chunk = update_of(end, 32 << 10)
    for version in range(count):
        start = time.monotonic()
        try:
            end.send_chunk(replace(chunk, header={**chunk.header, "version": version}), timeout)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)
            return
        finally:
            seconds.append(time.monotonic() - start)


def exchange(
    source: TransportBackend, target: TransportBackend, chunk: WeightChunk, timeout: float = LONG
) -> WeightChunk:
    """Send from another thread, so that a transport whose ``send_chunk`` waits for a reader works too."""
    thread = in_background(source.send_chunk, chunk, timeout)
    got = must_receive(target, timeout)
    must_end(thread, timeout, "the chunk has arrived, but send_chunk() has not returned")
    return got


def in_background(action: Callable[..., object], *args: object) -> threading.Thread:
    """Run ``action`` in a thread."""
    thread = threading.Thread(target=action, args=args, daemon=True)
    thread.start()
    return thread


def must_receive(end: TransportBackend, timeout: float = LONG) -> WeightChunk:
    """Return the next chunk; fail the test if none comes."""
    chunk = end.recv_chunk(timeout)
    assert chunk is not None, f"recv_chunk({timeout:g}) returned None: a chunk that was sent did not come"
    return chunk


def must_end(thread: threading.Thread, timeout: float, problem: str) -> None:
    """Wait for the end of a thread; fail the test with ``problem`` if it does not end."""
    thread.join(timeout)
    assert not thread.is_alive(), problem


def must_raise_closed(problem: str, call: Callable[..., object], *args: object) -> None:
    """Call a function; fail the test with ``problem`` if it returns instead of raising LinkClosedError."""
    try:
        call(*args)
    except LinkClosedError:
        return
    pytest.fail(f"{problem}; it has to raise LinkClosedError")


def must_be_closed(end: TransportBackend, timeout: float, event: str) -> None:
    """Receive until the link raises LinkClosedError; fail the test if it returns None after ``event``."""
    must_raise_closed(f"recv_chunk({timeout:g}) returned None after {event}", drain, end, timeout)


def drain(end: TransportBackend, timeout: float | None, errors: list[BaseException] | None = None) -> None:
    """Receive until the link raises; with ``errors``, put the error there."""
    try:
        while end.recv_chunk(timeout) is not None:
            pass
    except BaseException as error:
        if errors is None:
            raise
        errors.append(error)


@dataclass(frozen=True, eq=False)
class Spoilt(WeightChunk):
    """A chunk whose prelude and header are changed by ``spoil`` when it is encoded."""

    spoil: Callable[[bytes], bytes] = bytes

    def encode_head(self, *, checksum: bool = True) -> bytes:
        return self.spoil(super().encode_head(checksum=checksum))


SPOILERS = [
    pytest.param(lambda head: b"\xa5" * len(head), id="no frame"),
    pytest.param(lambda head: head[:5] + b"\xc8" + head[6:], id="unknown kind"),
    pytest.param(lambda head: head[:12] + b"\xff" * 8 + head[20:], id="huge payload"),
    pytest.param(lambda head: head[:-1] + bytes([head[-1] ^ 1]), id="damaged header"),
]
"""Ways in which a frame's prelude and header may be wrong."""


def assert_same(got: WeightChunk, sent: WeightChunk) -> None:
    """Compare two chunks; an empty payload may arrive as None."""
    assert (got.kind, got.header) == (sent.kind, sent.header), "a chunk arrived with another kind or header"
    assert got.payload_bytes == sent.payload_bytes, "a payload arrived with another size"
    if sent.payload is not None and got.payload is not None:
        assert torch.equal(got.payload, sent.payload), "bytes of a payload changed, on the way or afterwards"
