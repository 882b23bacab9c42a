"""A synchronizer in a Ray actor. A short test is in test_ray.py, which has started Ray already."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from sync_parts import ExplorerThread, exchange, model_at, set_to, step_of, train, wait_until

from weight_update import (
    ExplorerClient,
    LinkClosedError,
    Synchronizer,
    SyncMethod,
    SyncStyle,
    SyncTimeoutError,
    TrainerClient,
)
from weight_update.synchronizer import ray_actor

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "weight-update[ray]"')
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent.parent.parent))
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield
        ray.shutdown()


def kill(actor: Any, *, no_restart: bool) -> None:
    """Kill an actor, and wait until its process has ended: it could still take weights after ray.kill()."""
    pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    ray.kill(actor, no_restart=no_restart)
    wait_until(lambda: not psutil.pid_exists(pid))


@pytest.mark.parametrize("method", list(SyncMethod))
def test_an_actor_coordinates(method: SyncMethod, cluster: None, tmp_path: Path) -> None:
    made = Synchronizer(method, SyncStyle.FIXED, sync_interval=2, directory=tmp_path)
    host = made.as_ray_actor(f"sync-{method.value}")
    threads = [ExplorerThread(host.address, 8, id=id) for id in range(2)]
    for thread in threads:
        thread.start()
    train(host, lambda: any(thread.is_alive() for thread in threads))
    for thread in threads:
        assert thread.seen.error is None
        assert [sync.step for sync in thread.seen.syncs] == [2, 4, 6, 8]
        assert all("reason" not in sync.metrics for sync in thread.seen.syncs)
    made.close()


def test_an_actor_that_dies_is_started_again_and_goes_on_from_the_last_version(
    cluster: None, tmp_path: Path
) -> None:
    made = Synchronizer(SyncMethod.MEMORY, SyncStyle.EXPLORER_DRIVEN, directory=tmp_path)
    host = made.as_ray_actor("sync-again", max_restarts=1)
    source, model = model_at(0), model_at(-1)
    versions = []
    with TrainerClient(host, source) as trainer, ExplorerClient(host, model) as explorer:
        for step in (1, 2):
            set_to(source, step)
            trainer.step = explorer.step = step
            versions.append(exchange(trainer, explorer))
            assert step_of(model) == step
            kill(ray.get_actor("sync-again"), no_restart=step == 2)
    assert versions[1] > versions[0]
    made.close()


def test_an_actor_for_which_the_cluster_has_no_room(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actor, "_START_SECONDS", 3.0)
    made = Synchronizer(SyncMethod.MEMORY)
    with pytest.raises(SyncTimeoutError, match="'sync-big' did not start in 3 s; does the cluster have"):
        made.as_ray_actor("sync-big", num_cpus=1000)
    wait_until(lambda: "sync-big" not in ray.util.list_named_actors())
    made.close()


def test_while_services_of_ray_are_away_the_synchronizer_is(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another error would reach the program, and end the thread that sends signs of life."""
    with Synchronizer(SyncMethod.CHECKPOINT, SyncStyle.FIXED, directory=tmp_path) as made:
        channel = ray_actor.RayChannel(made.as_ray_actor("sync-away").address)

        def fail(*_: Any) -> None:
            raise ray.exceptions.RpcError("the control store is away")

        with monkeypatch.context() as patched:
            patched.setattr(ray_actor, "named_actor", fail)
            with pytest.raises(LinkClosedError, match="the control store is away"):
                channel.call("status", {}, 5.0)
        assert "trainer" in channel.call("status", {}, 20.0)


def test_clients_start_no_cluster_when_ray_has_ended(cluster: None) -> None:
    host = Synchronizer(SyncMethod.MEMORY, lease=1.0).as_ray_actor("sync-end")
    explorer = ExplorerClient(host, model_at(-1), timeout=1.0)
    ray.shutdown()
    time.sleep(1.0)  # in which a sign of life is due
    with pytest.raises(LinkClosedError, match="Ray does not run in this process"):
        explorer.blocking.need_sync()
    explorer.close()
    assert not ray.is_initialized()
