"""Object stores that are slow, or do not answer at all."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from threading import Event
from unittest import mock

import pytest
from object_store_parts import TOKEN, Ends, Faults, arrives
from torch import nn

from weight_update import SyncFailedError, SyncTimeoutError
from weight_update.testing import mlp, scramble
from weight_update.testing.models import fingerprint
from weight_update.testing.processes import wait_until
from weight_update.transports.object_store.manifest import StoreManifest
from weight_update.transports.object_store.store import ObjectStore
from weight_update.transports.socket_stream import deadline_of


def test_a_store_that_does_not_answer(ends: Ends, faults: Faults, awake: Event) -> None:
    source, model = mlp(1), mlp(2)
    sender = ends.sender(source, timeout=1.0)
    reader = ends.reader(model)
    faults(lambda verb, path: verb == "read" or awake.wait(60))
    scramble(source, 3)
    start = time.monotonic()
    with pytest.raises(SyncFailedError, match=r"could not write .* within 1|is late"):
        sender.send()
    faults(lambda verb, path: verb == "write" or awake.wait(60))
    with pytest.raises(SyncTimeoutError):
        ends.reader(mlp(3), connect_timeout=1.0)
    assert time.monotonic() - start < 10.0
    faults()
    awake.set()
    arrives(reader, 1)
    assert fingerprint(model) == fingerprint(source)


def test_connecting_to_a_store_that_does_not_answer(ends: Ends, faults: Faults, awake: Event) -> None:
    sender = ends.sender(mlp(1), connect=False)
    faults(lambda verb, path: awake.wait(60))
    start = time.monotonic()
    with pytest.raises(SyncTimeoutError, match=r"could not read .*latest.json within 0.5 s; raise timeout="):
        sender.connect(timeout=0.5)
    assert time.monotonic() - start < 20.0


def test_a_store_that_is_slow_is_no_worker_in_hold(ends: Ends, faults: Faults, awake: Event) -> None:
    sender = ends.sender(mlp(1))
    faults(lambda verb, path: verb == "read" or awake.wait(60))
    with pytest.raises(SyncFailedError, match=r"within 0.1 s: it is still being sent, .* slow") as caught:
        sender.send_async().wait(0.1)
    assert "hold()" not in str(caught.value)


def test_the_cause_is_told_though_the_last_read_was_late(ends: Ends, faults: Faults, awake: Event) -> None:
    ends.sender(mlp(1))
    reads = itertools.count()

    def answer_once(verb: str, path: str) -> None:
        if verb == "read" and next(reads):  # the sender lists the objects now
            awake.wait(60)
        raise PermissionError("no")

    faults(answer_once)
    with pytest.raises(SyncTimeoutError, match="PermissionError: no"):
        ends.reader(mlp(2), connect_timeout=0.5)


def test_a_late_write_replaces_no_newer_manifest(ends: Ends, url: str, faults: Faults, awake: Event) -> None:
    held = Event()
    sender = ends.sender(mlp(1), timeout=1.0)

    def hold_the_first(verb: str, path: str) -> None:
        if verb == "write" and "manifest" in path and not held.is_set():
            held.set()
            awake.wait(60)

    faults(hold_the_first)
    with pytest.raises(SyncFailedError):
        sender.send()
    threading.Timer(0.5, awake.set).start()
    wait_until(lambda: sender.version == 1)
    assert sender.send().version == 2
    time.sleep(0.5)
    assert StoreManifest.decode((Path(url) / "latest.json").read_bytes(), TOKEN).newest == 2


def test_a_late_object_of_many_tells_the_time_for_all_of_them(ends: Ends, faults: Faults) -> None:
    store = ObjectStore(ends.url, {}, 10.0)
    faults(lambda verb, path: time.sleep(0.2))
    objects = [(f"run/{number}", [b"x"]) for number in range(40)]
    with pytest.raises(SyncTimeoutError, match=r"could not write .* within 0\.5 s; raise timeout="):
        store.write_all(objects, deadline_of(0.5))


def test_what_a_late_manifest_names_is_not_removed(ends: Ends, faults: Faults, awake: Event) -> None:
    held, attempts = Event(), list[str]()
    source, model = mlp(1), mlp(2)
    sender = ends.sender(source, timeout=1.0)

    def hold_the_manifest(verb: str, path: str) -> None:
        if verb == "write" and "/manifest-" in path:
            held.set()
            awake.wait(60)
        elif verb == "write" and "/welcome-" not in path and held.is_set():
            attempts.append(path)
            raise PermissionError("no")

    faults(hold_the_manifest)
    scramble(source, 3)
    with pytest.raises(SyncFailedError):
        sender.send()
    wait_until(lambda: attempts)
    awake.set()
    seen = len(attempts)
    wait_until(lambda: len(attempts) > seen + 1)
    reader = ends.reader(model)
    assert reader.version == 1
    assert fingerprint(model) == fingerprint(source)


@pytest.mark.parametrize("verb", ["write", "read"])
def test_requests_that_hang_together_stop_no_later_ones(
    ends: Ends, faults: Faults, small_pieces: int, verb: str, awake: Event
) -> None:
    """As where all connections are lost at the same moment, and clients notice it after minutes."""
    source, model = nn.Linear(16, 16), nn.Linear(16, 16)
    sender, reader = ends.sender(source, timeout=1.0), ends.reader(model, timeout=1.0)
    held: list[str] = []

    def hold(begun: str, path: str) -> None:
        if begun == verb and ".frame." in path and len(held) < 8:
            held.append(path)
            awake.wait(60)

    faults(hold)
    scramble(source, 3)
    sender.send_async()
    arrives(reader, 1)
    assert len(held) == 8
    assert fingerprint(model) == fingerprint(source)


def test_requests_that_never_end_are_few(ends: Ends, faults: Faults, awake: Event) -> None:
    ends.sender(mlp(1))
    reader = ends.reader(mlp(2), timeout=0.05)
    started: list[str] = []

    def hold(verb: str, path: str) -> None:
        if verb == "read" and not awake.is_set():
            started.append(path)
            awake.wait(60)

    assert reader._receiver is not None
    faults(hold)
    with mock.patch.object(reader._receiver.link, "_look_after", return_value=None):
        time.sleep(3.0)  # 60 times the timeout of a request
    assert 1 <= len(started) <= 32
