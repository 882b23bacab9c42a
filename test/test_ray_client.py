"""Ray's client: a driver outside of the cluster is the trainer, and actors are its workers."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from weight_update import RayWeightSyncScheme, SyncFailedError
from weight_update.testing import mlp

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "weight-update[ray]"')
from ray_parts import WAIT, JoiningActor, small_cluster  # noqa: E402

from collectors.nodes import free_port  # noqa: E402


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("data", ["torch", "object_store"])
def test_a_driver_of_rays_client_learns_that_an_actor_died(data: str) -> None:
    from ray.util.client.server.server import serve

    here, port = Path(__file__).parent, free_port()
    with small_cluster(here.parent, here):
        server = serve("127.0.0.1", port)
        try:
            driver = [sys.executable, __file__, str(port), data]
            done = subprocess.run(driver, capture_output=True, text=True, timeout=200)
        finally:
            server.stop(0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["version 1 for [0, 1]", "failed: [1]", "version 3 for [0, 1]"]


def drive(port: str, data: str) -> None:
    """Send to two actors, and kill one, which Ray starts again."""
    ray.init(f"ray://127.0.0.1:{port}", log_to_driver=False)
    with RayWeightSyncScheme(data=data, host="elsewhere", timeout=20.0) as scheme:
        actor: Any = ray.remote(JoiningActor).options(num_cpus=0, max_restarts=-1)
        theirs = RayWeightSyncScheme(data=data, token=scheme.token)  # on another host than the driver's
        actors = [actor.remote(theirs, idx) for idx in range(2)]
        scheme.init_on_sender(model=mlp(1), remote_collectors=actors)
        scheme.connect()
        send(scheme)
        ray.kill(actors[1], no_restart=False)
        wait_until_joined(scheme, False)
        send(scheme)
        wait_until_joined(scheme, True)
        send(scheme)
    ray.shutdown()


def send(scheme: RayWeightSyncScheme) -> None:
    try:
        report = scheme.send()
        print(f"version {report.version} for {sorted(report.apply_seconds)}", flush=True)
    except SyncFailedError as error:
        print(f"failed: {sorted(error.failures)}", flush=True)


def wait_until_joined(scheme: RayWeightSyncScheme, joined: bool) -> None:
    deadline = time.monotonic() + WAIT
    while (scheme.worker_versions[1] is not None) != joined and time.monotonic() < deadline:
        time.sleep(0.05)


if __name__ == "__main__":
    drive(*sys.argv[1:])
