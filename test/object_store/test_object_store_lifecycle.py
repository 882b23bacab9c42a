"""Joining, arguments, tokens and ends of schemes with an object store."""

from __future__ import annotations

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from object_store_parts import TOKEN, Ends, Faults, Scheme, frames
from torch import nn

from weight_update import (
    JoinRefusedError,
    LifecycleError,
    LinkClosedError,
    PatchEncoding,
    SchemaMismatchError,
    SyncFailedError,
    SyncTimeoutError,
    WeightStrategy,
)
from weight_update.testing import mlp
from weight_update.testing.chunks import hello
from weight_update.testing.models import fingerprint
from weight_update.testing.processes import wait_until
from weight_update.transports.object_store import publisher


def test_another_token(ends: Ends) -> None:
    ends.sender(mlp(1))
    with pytest.raises(JoinRefusedError, match="published with another token: give both sides the same"):
        ends.reader(mlp(2), token="other")
    with pytest.raises(JoinRefusedError, match="published with another token"):
        ends.sender(mlp(1), token="other")


def test_a_token_of_the_environment(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHT_UPDATE_TOKEN", TOKEN)
    ends.sender(mlp(1), token=None)
    monkeypatch.delenv("WEIGHT_UPDATE_TOKEN")
    model = mlp(2)
    ends.reader(model, token=TOKEN)
    assert fingerprint(model) == fingerprint(mlp(1))


def test_a_reader_that_disconnected_has_to_begin_again(ends: Ends) -> None:
    ends.sender(mlp(1))
    link = ends.scheme().create_transport(worker_idx=0, end="receiver")
    for _ in range(2):
        with pytest.raises(LinkClosedError, match="not connected"):
            link.recv_chunk(0.1)
        link.restart()
        link.send_chunk(hello())
        assert link.recv_chunk(1.0) is not None
        link.disconnect()
    link.close()


def test_nothing_was_published(ends: Ends) -> None:
    with pytest.raises(
        SyncTimeoutError, match=r"no version is in .*store yet; has the trainer called connect"
    ):
        ends.reader(mlp(1), connect_timeout=0.3)


def test_a_reader_waits_for_the_first_version(ends: Ends) -> None:
    model = mlp(2)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(ends.reader, model)
        time.sleep(0.2)
        ends.sender(mlp(1))
        joining.result(10.0)
    assert fingerprint(model) == fingerprint(mlp(1))


def test_other_weights_are_refused_with_all_differences(ends: Ends) -> None:
    sender = ends.sender(nn.Linear(3, 2))
    reader = ends.scheme()
    reader.init_on_receiver(model=nn.Linear(3, 2, bias=False), worker_idx=7)
    with pytest.raises(SchemaMismatchError, match=r"worker 7 does not have the same weights(.|\n)*bias"):
        reader.connect()
    assert sender.send().version == 1


def test_both_ends_end_at_once(ends: Ends) -> None:
    sender, reader = ends.sender(mlp(1)), ends.reader(mlp(2), poll_seconds=100.0)
    start = time.monotonic()
    reader.shutdown()
    sender.shutdown()
    assert time.monotonic() - start < 30.0
    with pytest.raises(LifecycleError):
        sender.send()


def test_a_pickled_scheme_is_the_same(url: str) -> None:
    scheme = Scheme(
        url, WeightStrategy(encoding="patch"), most_changes=5, storage_options={"auto_mkdir": True}
    )
    twin = pickle.loads(pickle.dumps(scheme))
    for name in ("url", "token", "most_changes", "poll_seconds", "storage_options"):
        assert getattr(twin, name) == getattr(scheme, name)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"url": "nosuch://x"}, ValueError, "Protocol not known"),
        ({"url": ""}, ValueError, "url is empty"),
        ({"url": "/data/run::1"}, ValueError, "url='/data/run::1' has '::', by which fsspec chains file"),
        ({"url": "run::1"}, ValueError, "has '::'"),
        ({"url": "memory://bucket/run::1"}, ValueError, "has '::'"),
        (
            {"url": "simplecache::memory://run"},
            ValueError,
            "keeps copies of objects.* leave 'simplecache::' out",
        ),
        ({"url": "filecache::memory://run"}, ValueError, "keeps copies of objects"),
        ({"url": "blockcache::memory://run"}, ValueError, "keeps copies of objects"),
        ({"url": 5}, TypeError, "url is a string, such as 's3://bucket/run'"),
        ({"most_changes": -1}, ValueError, "most_changes is an integer of at least 0"),
        ({"poll_seconds": 0}, ValueError, "poll_seconds is a positive number"),
        ({"token": ""}, ValueError, "token is empty"),
        *(
            ({"strategy": WeightStrategy(encoding=PatchEncoding(**some))}, ValueError, "leave init_sync")
            for some in ({"init_sync": False}, {"init_sync_prefixes": []})
        ),
    ],
)
def test_bad_arguments(url: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Scheme(**{"url": url, **options})


@pytest.mark.parametrize("name", ["params_map", "device_map_fn"])
def test_workers_cannot_have_weights_of_their_own(ends: Ends, name: str) -> None:
    with pytest.raises(ValueError, match=f"all workers read the same weights: give no {name}"):
        ends.scheme().init_on_sender(**{"model": mlp(1), name: {0: mlp(1)}})


def test_a_collector_gives_its_own_number_of_workers(ends: Ends) -> None:
    scheme = ends.scheme()
    scheme.init_on_sender(model=mlp(1), num_workers=4, devices=["cpu"] * 4)
    scheme.connect()
    assert scheme.worker_versions == {0: 0}


def test_processes_and_indices_of_workers_mean_nothing_to_the_sender(ends: Ends) -> None:
    """Collectors set and give them."""
    sender = ends.sender(mlp(1), connect=False)
    sender.worker_alive = lambda worker_idx: False
    sender.connect()
    assert sender.send(worker_ids=[2, 3]).version == 1


def test_connecting_again_after_an_error_of_the_source(ends: Ends) -> None:
    sender = ends.sender(mlp(1), connect=False)
    with pytest.raises(SchemaMismatchError):
        sender.connect(weights=nn.Linear(3, 2))
    sender.connect(timeout=5.0)


def test_a_second_trainer_leaves_the_first_nothing_to_write(
    ends: Ends, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_FIRST_PAUSE", 0.02)
    first, _ = ends.sender(mlp(1)), ends.sender(mlp(2))
    wait_until(lambda: len(frames(url)) == 2)  # the second has removed those of the first
    with pytest.raises(SyncFailedError, match="another sender has published"):
        first.send()
    before = len(frames(url))
    time.sleep(0.5)  # 25 times the first pause
    assert len(frames(url)) == before


def test_a_late_trainer_removes_nothing_of_the_next(ends: Ends, faults: Faults, awake: Event) -> None:
    held = Event()
    first = ends.sender(mlp(1))

    def hold_the_first(verb: str, path: str) -> None:
        if verb == "list" and not held.is_set():
            held.set()
            awake.wait(60)

    (writer,) = first._sender.table
    wait_until(lambda: not writer.writing)  # what connect() published is cleaned up
    faults(hold_the_first)
    first.send()
    assert held.wait(5.0)
    ends.sender(mlp(2))
    awake.set()
    time.sleep(0.5)
    model = mlp(3)
    ends.reader(model)
    assert fingerprint(model) == fingerprint(mlp(2))


def test_a_relative_path_and_a_path_of_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert Scheme("store").url == str(tmp_path / "store")
    assert Scheme(Path("store")).url == str(tmp_path / "store")
    assert Scheme("~/store").url == "/home/someone/store"
    assert Scheme("memory://store").url == "memory://store"
