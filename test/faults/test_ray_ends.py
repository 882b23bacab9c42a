"""Another thread shuts Ray down while a call waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from weight_update import LinkClosedError, RayWeightSyncScheme, SyncFailedError
from weight_update.schemes.ray_transform import _error_of
from weight_update.testing import mlp
from weight_update.testing.processes import wait_until
from weight_update.transports.ray import rendezvous
from weight_update.transports.ray.actors import ActorWatch
from weight_update.transports.ray.object_store import RayObjectStore
from weight_update.transports.ray.rendezvous import ask, call, is_done, named_actor, node_id, until_ray_ends
from weight_update.wire.frames import Kind, WeightChunk

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "weight-update[ray]"')
from ray_parts import WAIT, JoiningActor, small_cluster  # noqa: E402

pytestmark = pytest.mark.timeout(180)
LATE = 30.0
"""The time limit of an update, which must not pass."""


@pytest.fixture
def cluster() -> Iterator[None]:
    """Start a Ray for one test, which may shut it down."""
    tests = Path(__file__).parent.parent
    with small_cluster(tests.parent, tests):
        yield


def launch(data: str) -> RayWeightSyncScheme:
    """Return an initialized sender of two actors, which join in their constructors."""
    scheme = RayWeightSyncScheme(data=data, timeout=LATE, connect_timeout=WAIT)
    joining = [ray.remote(JoiningActor).options(num_cpus=0).remote(scheme, idx) for idx in (0, 1)]
    scheme.init_on_sender(model=mlp(1), remote_collectors=joining)
    return scheme


def send_until_error(scheme: RayWeightSyncScheme) -> SyncFailedError:
    try:
        while True:
            scheme.send()
    except SyncFailedError as error:
        return error


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("data", ["torch", "object_store", "between hosts"])
def test_ray_is_shut_down_during_updates(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if data == "between hosts":
        monkeypatch.setenv("WEIGHT_UPDATE_HOST", "elsewhere")
    scheme = launch("torch" if data == "torch" else "object_store")
    scheme.connect()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send_until_error, scheme)
        time.sleep(0.3)
        began = time.monotonic()
        ray.shutdown()
        errors = [sending.result(), send_until_error(scheme)]
    assert time.monotonic() - began < LATE / 2
    for error in errors:
        assert "did not apply it" not in str(error)
        assert {type(one) for one in error.failures.values()} == {LinkClosedError}
    scheme.shutdown()
    assert time.monotonic() - began < LATE / 2
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("weight_update")])


def put_payload(_: Any) -> None:
    payload = torch.zeros(1 << 17, dtype=torch.uint8)
    RayObjectStore().put(WeightChunk(Kind.COMMIT, {"version": 1}, payload))


@pytest.mark.parametrize(
    "use",
    [
        lambda reference: is_done(reference, 10.0),
        lambda reference: ask(reference, 10.0),
        lambda _: named_actor("nobody", None),
        lambda _: node_id(),
        _error_of,
        put_payload,
    ],
)
def test_a_call_just_after_the_shutdown_starts_no_new_ray(
    use: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's functions start a Ray where none runs; another thread may end it just before they are called."""
    assert not ray.is_initialized()
    monkeypatch.setattr(rendezvous, "ray_runs", iter([True, False]).__next__)
    with pytest.raises(LinkClosedError, match="Ray was shut down in this process"):
        use(ray.ObjectRef.from_random())
    assert not ray.is_initialized()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_call_of_an_actor_just_after_the_shutdown_starts_no_new_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor = ray.remote(type("Idle", (), {})).options(num_cpus=0).remote()
    ray.shutdown()
    monkeypatch.setattr(rendezvous, "ray_runs", iter([True, False]).__next__)
    with pytest.raises(LinkClosedError, match="Ray was shut down in this process"):
        call(actor.__ray_ready__)
    assert not ray.is_initialized()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("data", ["torch", "object_store"])
def test_schemes_of_an_earlier_ray_end_without_an_error(data: str, caplog: pytest.LogCaptureFixture) -> None:
    scheme = launch(data)
    scheme.connect()
    ray.shutdown()
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    with pytest.raises(SyncFailedError):
        scheme.send()
    scheme.shutdown()
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("weight_update")])
    assert not [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]


@pytest.mark.parametrize("end", ["wait", "signal"])
def test_the_exit_that_ray_raises_is_an_error(end: str) -> None:
    """Ray ends the waits of all threads by SystemExit; that of a signal handler passes."""
    raised = SystemExit(0)
    if end == "wait":
        raised.ray_terminate_msg = "shut down"  # type: ignore[attr-defined]
    with pytest.raises(LinkClosedError if end == "wait" else SystemExit), until_ray_ends():
        raise raised


def test_actors_are_asked_for_their_state_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """connect() may exceed its limit by the time of one question, not by that of a question an actor."""
    barrier = threading.Barrier(8, timeout=10.0)
    monkeypatch.setattr(ActorWatch, "_trouble", lambda *_: (False, f"asked {barrier.wait() >= 0}"))
    failures: dict[int, Exception] = {idx: LinkClosedError("its process ended") for idx in range(8)}
    watch = ActorWatch({idx: f"Actor {idx}" for idx in failures})
    named = watch.all_named(SyncFailedError("workers could not connect:", failures))
    assert str(named.failures[7]) == "'Actor 7': asked True"


def test_an_actor_is_named_once() -> None:
    watch = ActorWatch({0: "Actor 0"})
    error = watch.named(0, LinkClosedError("the other end has left"))
    assert str(watch.named(0, error)) == "'Actor 0': the other end has left"
