"""Ray: actors as workers, for both values of ``data``."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weight_update import (
    ExplorerClient,
    LifecycleError,
    LinkClosedError,
    NotEnoughMemoryError,
    PatchEncoding,
    RayWeightSyncScheme,
    SyncFailedError,
    Synchronizer,
    SyncTimeoutError,
    TrainerClient,
    TransportError,
    WeightChunk,
    WeightStrategy,
    WeightSyncScheme,
)
from weight_update.serving.vllm.joining import connect_with, init_info, receiving_scheme
from weight_update.testing import (
    LateJoinerContract,
    SchemeContract,
    TransportContract,
    fingerprint,
    greet,
    mlp,
    scramble,
)
from weight_update.testing.chunks import (
    Ends,
)
from weight_update.testing.processes import eventually, freeze, wait_until
from weight_update.testing.ray_workers import RayWorker
from weight_update.testing.schemes import LifecycleTests
from weight_update.transports.host_name import this_host
from weight_update.transports.ray.object_store import RayObjectStore
from weight_update.transports.ray.rendezvous import (
    find_rendezvous,
    look_up,
    start_rendezvous,
    stop_rendezvous,
)
from weight_update.transports.ray.transport import RayListener, RayTransport
from weight_update.wire.frames import Kind

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "weight-update[ray]"')
from ray_parts import (  # noqa: E402
    WAIT,
    JoiningActor,
    Owner,
    Trainer,
    pid_of,
    slots_of,
    small_cluster,
    wait_for_more,
    wide,
    writable,
)

ROUTES = pytest.mark.parametrize("data", ["torch", "object_store", "between hosts"], indirect=True)
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Start one Ray for the module, whose workers can import the files of this folder."""
    here = Path(__file__).parent
    with small_cluster(here.parent, here, megabytes=300):
        yield


@pytest.fixture(scope="class")
def actor(request: pytest.FixtureRequest) -> Iterator[None]:
    request.cls.actor = start_rendezvous("test of transports", None)
    yield
    stop_rendezvous(request.cls.actor)


@pytest.mark.smoke
@pytest.mark.usefixtures("actor")
class TestRayTransport(TransportContract):
    """A worker on the sender's host. The tests share an actor, so each waits for its own announcement."""

    host: str | None = None  # of the receiver; None is this one
    actor: Any

    def make_ends(self) -> Ends:
        sender = RayTransport()
        self.listener = RayListener(self.actor, this_host(), "token", {0: sender}, lambda worker: sender)
        self.listener.start()
        where = this_host(), self.listener._local.address
        wait_until(lambda: look_up(self.actor, "object_store", WAIT) == where, WAIT)
        receiver = self.make_successor()
        greet(sender, receiver)
        return sender, receiver

    def make_successor(self) -> RayTransport:
        return RayTransport(
            lambda _: find_rendezvous("test of transports", None, 10.0, lambda: None),
            token="token",
            host=self.host,
        )

    def teardown_method(self) -> None:
        self.listener.close()


class TestRayTransportBetweenHosts(TestRayTransport):
    """Messages go through the rendezvous actor, and payloads through the object store."""

    host = "elsewhere"


@pytest.mark.slow
class TestObjectStoreEnds(LifecycleTests):
    method = "ray"

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return RayWeightSyncScheme(data="object_store", **options)


@pytest.mark.slow
class TestTorch(SchemeContract, LateJoinerContract):
    method = "ray"

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return RayWeightSyncScheme(**options)


@pytest.mark.slow
class TestObjectStore(SchemeContract, LateJoinerContract):
    method = "ray"

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return RayWeightSyncScheme(data="object_store", **options)


@pytest.mark.usefixtures("apart")
class TestObjectStoreBetweenHosts(TestObjectStore):
    """The workers count as being on other hosts."""


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process a host of its own; actors have the environment of the cluster."""
    monkeypatch.setenv("WEIGHT_UPDATE_HOST", "elsewhere")


@pytest.fixture
def data(request: pytest.FixtureRequest) -> str:
    """Return the scheme's ``data``; "between hosts" is the object store with workers on other hosts."""
    if request.param != "between hosts":
        return str(request.param)
    request.getfixturevalue("apart")
    return "object_store"


class RaySchemes:
    """Senders and actors of one test."""

    def __init__(self) -> None:
        self._schemes: list[RayWeightSyncScheme] = []
        self._workers: list[RayWorker] = []
        self._joining: list[Any] = []

    def scheme(self, **options: Any) -> RayWeightSyncScheme:
        self._schemes.append(RayWeightSyncScheme(**{"timeout": 20.0, "connect_timeout": WAIT, **options}))
        return self._schemes[-1]

    def start_worker(self, scheme: RayWeightSyncScheme, idx: int, model: Any = None) -> RayWorker:
        """Return an initialized actor."""
        self._workers.append(RayWorker(scheme, idx))
        self._workers[-1].call("init", mlp(100 + idx) if model is None else model)
        return self._workers[-1]

    def launch(
        self, source: Any, *models: Any, **options: Any
    ) -> tuple[RayWeightSyncScheme, list[RayWorker]]:
        """Return a connected sender and its actors, which existed before ``init_on_sender``."""
        scheme = self.scheme(**options)
        workers = [self.start_worker(scheme, idx, model) for idx, model in enumerate(models or (None, None))]
        for worker in workers:
            worker.post("connect")
        scheme.init_on_sender(model=source, remote_collectors=[worker.actor for worker in workers])
        scheme.connect()
        for worker in workers:
            worker.answer()
        return scheme, workers

    def joining_actor(self, scheme: RayWeightSyncScheme, idx: int, restarts: int = 0) -> Any:
        """Return an actor that joins in its constructor."""
        actor = ray.remote(JoiningActor).options(num_cpus=0, max_restarts=restarts)
        self._joining.append(actor.remote(scheme, idx))
        return self._joining[-1]

    def close(self) -> None:
        for actor in self._joining:
            ray.kill(actor)
        for worker in self._workers:
            worker.stop()
        for scheme in self._schemes:
            scheme.shutdown()


@pytest.fixture
def schemes() -> Iterator[RaySchemes]:
    schemes = RaySchemes()
    yield schemes
    schemes.close()


def send_until_error(scheme: RayWeightSyncScheme) -> None:
    """An actor that is killed may take one more update before it ends."""
    for _ in range(100):
        scheme.send()
        time.sleep(0.01)


def gone(name: str) -> bool:
    try:
        ray.get_actor(name)
    except ValueError:
        return True
    return False


def is_available(actor: Any) -> bool:
    """Return whether Ray takes calls for an actor; it takes none while the actor is restarted."""
    try:
        return bool(ray.get(actor.pid.remote(), timeout=WAIT))
    except ray.exceptions.ActorUnavailableError:
        return False


@pytest.mark.slow
@ROUTES
def test_busy_killed_restarted_and_dead_actors(data: str, schemes: RaySchemes) -> None:
    source = mlp(1)
    scheme = schemes.scheme(data=data)
    actors = [schemes.joining_actor(scheme, idx, restarts=1) for idx in range(2)]
    scheme.init_on_sender(model=source, remote_collectors=actors)
    scheme.connect()

    def all_have_it(chosen: list[Any]) -> bool:
        states = ray.get([actor.state.remote() for actor in chosen], timeout=WAIT)
        return states == [(scheme.version, fingerprint(source))] * len(chosen)

    assert all_have_it(actors)
    call = actors[0].busy.remote(3.0)
    scramble(source, 2)
    assert scheme.send().version == 1
    assert ray.wait([call], timeout=0)[0] == []
    os.kill(ray.get(actors[1].pid.remote()), signal.SIGKILL)
    scramble(source, 3)
    with pytest.raises(SyncFailedError, match=r"worker 1: Actor\(JoiningActor, ") as caught:
        send_until_error(scheme)
    assert {idx: type(error) for idx, error in caught.value.failures.items()} == {1: LinkClosedError}
    assert all_have_it(actors[:1])
    assert eventually(lambda: scheme.worker_versions[1] is not None, WAIT)  # Ray made it anew
    assert eventually(lambda: is_available(actors[1]), WAIT)  # Ray told this process later
    assert all_have_it(actors)
    ray.kill(actors[1])
    with pytest.raises(SyncFailedError, match=r"worker 1: Actor\(JoiningActor.* killed by `ray.kill`"):
        send_until_error(scheme)
    assert all_have_it(actors[:1])
    assert scheme.worker_versions == {0: scheme.version, 1: None}
    successor = schemes.start_worker(scheme, 1)
    scheme.actors[1] = successor.actor
    successor.call("connect")
    scheme.send()
    assert all_have_it(actors[:1])
    assert successor.call("fingerprint") == fingerprint(source)
    successor.runner.kill()
    with pytest.raises(SyncFailedError, match=r"worker 1: Actor\(BodyActor.* killed by `ray.kill`"):
        send_until_error(scheme)


@pytest.mark.slow
def test_connect_does_not_wait_for_the_dead(schemes: RaySchemes) -> None:
    scheme = schemes.scheme(data="object_store")
    workers = [schemes.start_worker(scheme, idx) for idx in range(2)]
    workers[0].post("connect")
    workers[1].runner.kill()
    scheme.init_on_sender(model=mlp(1), remote_collectors=[worker.actor for worker in workers])
    start = time.monotonic()
    with pytest.raises(SyncFailedError, match=r"worker 1: Actor\(BodyActor.* killed by `ray.kill`"):
        scheme.connect()
    assert time.monotonic() - start < WAIT / 2
    workers[0].answer()
    assert workers[0].call("fingerprint") == fingerprint(mlp(1))
    scheme.send(worker_ids=0)


@pytest.mark.slow
@ROUTES
def test_a_stopped_actor_is_late_and_catches_up(data: str, schemes: RaySchemes) -> None:
    scheme, workers = schemes.launch(mlp(1), data=data, timeout=1.0)
    pid = workers[0].call("run", pid_of)
    freeze(pid)
    try:
        with pytest.raises(SyncFailedError, match="worker 0: did not apply it within 1 s"):
            scheme.send(mlp(2))
        assert workers[1].call("fingerprint") == fingerprint(mlp(2))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert eventually(lambda: scheme.worker_versions[0] == 1, WAIT)
    assert workers[0].call("fingerprint") == fingerprint(mlp(2))


@pytest.mark.slow
@ROUTES
def test_strangers_and_the_end(data: str, schemes: RaySchemes) -> None:
    scheme, (worker,) = schemes.launch(mlp(1), mlp(2), data=data)
    other = schemes.scheme(data=data)
    other.name, other.port = scheme.name, scheme.port  # but not its token
    with pytest.raises(TransportError, match="token"):
        schemes.start_worker(other, 0).call("connect", timeout=20.0)
    early = schemes.start_worker(schemes.scheme(data=data), 0)
    start = time.monotonic()
    with pytest.raises(SyncTimeoutError, match="no sender"):
        early.call("connect", timeout=0.5)
    assert time.monotonic() - start < 30  # an answer of Ray takes seconds on a loaded machine
    scheme.send(mlp(2))
    assert worker.call("fingerprint") == fingerprint(mlp(2))
    worker.post("run", wait_for_more)
    scheme.shutdown()
    scheme.shutdown()
    assert worker.answer() == "LinkClosedError"
    assert eventually(lambda: gone(scheme.name), WAIT)
    assert worker.call("fingerprint") == fingerprint(mlp(2))


ENCODINGS = {
    "bucket": "bucket",
    "patch": PatchEncoding(),
    "patch, zstd": PatchEncoding(compression="zstd", init_sync_bucket_size=8 << 20),
}


@pytest.mark.slow  # test_matrix.py has all encodings over other schemes
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("data", ["torch", "object_store", "between hosts"], indirect=True)
def test_same_bits_for_every_encoding(data: str, encoding: str, schemes: RaySchemes) -> None:
    source = wide()
    strategy = WeightStrategy("state_dict", encoding=ENCODINGS[encoding])
    scheme, (worker,) = schemes.launch(source, wide(), data=data, strategy=strategy)
    for step, columns in enumerate((7, 7, 1000, 7), start=1):
        with torch.no_grad():
            source.weight[:, :columns].add_(step)
        report = scheme.send()
        assert (report.encoding == encoding.partition(",")[0]) is (encoding == "bucket" or columns == 7)
        assert worker.call("fingerprint") == fingerprint(source, strategy)
        assert worker.call("version") == step
    assert worker.call("run", writable)


@pytest.mark.slow
@pytest.mark.usefixtures("apart")
def test_the_object_store_is_freed(schemes: RaySchemes) -> None:
    """50 updates of 20 MB to two workers: one object for each, released before the next is put."""
    source = wide()
    scheme, workers = schemes.launch(source, wide(), wide(), data="object_store")
    most = 0
    for step in range(50):
        with torch.no_grad():
            source.weight.fill_(step)
        scheme.send()
        most = max(most, store_bytes())
    for worker in workers:
        assert worker.call("run", writable)
        assert worker.call("fingerprint") == fingerprint(source)
    assert most < 50e6
    scheme.shutdown()
    assert eventually(lambda: store_bytes() < 10e6, WAIT)


def store_bytes() -> float:
    """Wait until Ray reports it, about 0.1 s late."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return total["object_store_memory"] - free["object_store_memory"]


def test_workers_on_the_senders_host_read_its_memory(schemes: RaySchemes) -> None:
    """Workers on one host need no object in Ray's store, and no memory of their own."""
    source = wide()
    scheme, workers = schemes.launch(source, wide(), wide(), data="object_store")
    for step in range(3):
        source.weight.data.fill_(step)
        scheme.send()
        for worker in workers:
            assert worker.call("fingerprint") == fingerprint(source)
    assert not scheme._object_store._refs
    for worker in workers:
        assert worker.call("run", slots_of) == 1


def test_both_sides_need_one_kind_of_data(schemes: RaySchemes) -> None:
    scheme = schemes.scheme(data="object_store")
    scheme.init_on_sender(model=mlp(1), num_workers=1)
    other = schemes.scheme(name=scheme.name, token=scheme.token)
    with pytest.raises(LifecycleError, match="the sender's scheme has data='object_store'"):
        schemes.start_worker(other, 0).call("connect", timeout=WAIT)


@pytest.mark.parametrize("data", ["torch", "object_store"])
def test_shutdown_ends_the_search_for_the_sender(data: str, schemes: RaySchemes) -> None:
    scheme = schemes.scheme(data=data)
    scheme.init_on_receiver(model=mlp(1), worker_idx=0)
    began = time.monotonic()
    closing = threading.Timer(0.5, scheme.shutdown)
    closing.start()
    with pytest.raises(LifecycleError, match="was shut down"):
        scheme.connect()
    closing.join()
    assert time.monotonic() - began < WAIT / 2


@pytest.mark.slow
@pytest.mark.usefixtures("apart")
def test_a_payload_that_the_store_lost_comes_again(schemes: RaySchemes) -> None:
    source = wide()
    scheme, (worker,) = schemes.launch(source, wide(), data="object_store")
    put, lost = scheme._object_store.put, []

    def lose(chunk: Any) -> Any:
        ref = put(chunk)
        if not lost:
            owner = ray.remote(Owner).options(num_cpus=0).remote()
            lost.extend(ray.get(owner.put.remote(ref)))
            ray.kill(owner)
            return lost[0]
        return ref

    scheme._object_store.put = lose
    source.weight.data.fill_(1)
    handle = scheme.send_async()
    assert lost
    assert eventually(lambda: scheme.worker_versions[0] == 1, WAIT)
    assert worker.call("fingerprint") == fingerprint(source)
    assert handle.done()


def test_a_full_store_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(value: Any) -> Any:
        raise ray.exceptions.ObjectStoreFullError("no space")

    monkeypatch.setattr(ray, "put", full)  # Ray spills to disk first, and nobody wants to fill that
    welcome = {"schema": {}, "strategy": "", "keep": False, "version": None, "digests": None}
    with pytest.raises(NotEnoughMemoryError, match="object_store_memory"):
        RayObjectStore().put(WeightChunk(Kind.WELCOME, welcome, torch.zeros(1 << 20, dtype=torch.uint8)))


@pytest.mark.slow  # test_kills.py has trainers that die, with other schemes
@pytest.mark.parametrize("environment", [{}, {"WEIGHT_UPDATE_HOST": "elsewhere"}], ids=["here", "elsewhere"])
def test_workers_learn_that_their_trainer_died(environment: dict[str, str], schemes: RaySchemes) -> None:
    """The trainer is an actor, too."""
    scheme = schemes.scheme(data="object_store")
    options = {"num_cpus": 0, "runtime_env": {"env_vars": environment}}
    trainer = ray.remote(Trainer).options(**options).remote(scheme)
    worker = schemes.start_worker(scheme, 0)
    worker.post("connect")
    ray.get(trainer.connect.remote(), timeout=WAIT)
    worker.answer()
    worker.post("run", wait_for_more)
    ray.kill(trainer)
    assert worker.answer() == "LinkClosedError"
    assert eventually(lambda: gone(scheme.name), WAIT)


def test_arguments() -> None:
    with pytest.raises(ValueError, match="'object_store'"):
        RayWeightSyncScheme(data="pigeon")
    with RayWeightSyncScheme() as scheme, pytest.raises(ValueError, match="remote_collectors"):
        scheme.init_on_sender(model=mlp(1), num_workers=2, remote_collectors=["an actor"])


def test_two_senders_of_one_name(schemes: RaySchemes) -> None:
    with schemes.scheme() as first, schemes.scheme() as second:
        first.init_on_sender(model=mlp(1), num_workers=1)
        second.name = first.name
        with pytest.raises(LifecycleError, match=f"another sender of scheme '{first.name}' .* another name="):
            second.init_on_sender(model=mlp(1), num_workers=1)


def test_remote_collectors_that_are_no_list_of_actors() -> None:
    kind: Any = ray.remote(num_cpus=0)(Owner)
    actor = ray.remote(num_cpus=0)(type("Idle", (), {})).remote()
    for given, problem in (
        ([1], "got 1 in it"),
        ([kind], "got .* in it"),
        (actor, "got Actor.Idle"),
        (1, "got 1$"),
    ):
        with (
            RayWeightSyncScheme() as scheme,
            pytest.raises(TypeError, match=f"remote_collectors is a list of handles of actors.*{problem}"),
        ):
            scheme.init_on_sender(model=mlp(1), remote_collectors=given)


def test_no_thread_waits_in_ray_at_the_end(schemes: RaySchemes) -> None:
    before = set(threading.enumerate())

    def ours() -> list[str]:
        return [one.name for one in set(threading.enumerate()) - before if one.name.startswith("weight_up")]

    scheme, _ = schemes.launch(mlp(1), mlp(2), data="object_store")
    assert ours()
    scheme.shutdown()
    assert eventually(lambda: not ours(), WAIT)


def test_the_end_of_a_sender_is_no_refusal(schemes: RaySchemes, caplog: pytest.LogCaptureFixture) -> None:
    scheme, _ = schemes.launch(mlp(1), mlp(2), data="object_store")
    scheme.shutdown()
    assert caplog.messages == []


def test_a_worker_of_vllm() -> None:
    """A process that Ray does not know joins, as vLLM's workers do."""
    source, model = mlp(1), mlp(2)
    receivers = []

    def join() -> None:
        receivers.append(receiving_scheme(init_info(scheme)))
        receivers[0].init_on_receiver(model=model, worker_idx=0)
        receivers[0].connect()

    with RayWeightSyncScheme("state_dict", data="torch") as scheme:
        scheme.init_on_sender(model=source, num_workers=1)
        connect_with(scheme, [join])
        scramble(source, 1)
        scheme.send()
        assert fingerprint(model) == fingerprint(source)
        receivers[0].shutdown()


@pytest.mark.slow
def test_a_synchronizer_in_an_actor() -> None:
    source, model = mlp(1), mlp(2)
    with Synchronizer("memory", "trainer_driven") as made:
        host = made.as_ray_actor("synchronizer")
        with pytest.raises(LifecycleError, match="serves clients"):
            made.as_ray_actor("another")
        with TrainerClient(host, source) as trainer, ExplorerClient("ray:synchronizer", model) as explorer:
            assert not explorer.blocking.need_sync()
            assert trainer.blocking.sync_weight()["version"] == 0
            assert explorer.blocking.need_sync()
            assert explorer.blocking.sync_weight()["version"] == 0
            assert fingerprint(model) == fingerprint(source)
    with pytest.raises(LinkClosedError, match="no synchronizer answers in the actor"):
        ExplorerClient("ray:synchronizer", model, timeout=0.1)
