"""A Ray cluster of two hosts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts_processes import HostsProcesses

from weight_update.testing.processes import wait_until

pytest.importorskip("ray", reason='needs pip install "weight-update[ray]"')

HERE = Path(__file__).parent


class Cluster:
    """A node on "trainer", one on "one", and the driver on "trainer"."""

    def __init__(self, procs: HostsProcesses, temporary: str) -> None:
        self.network = procs.network
        self._temporary = temporary
        self._running: list[subprocess.Popen[str]] = []
        self._address = self.network.address["trainer"]

    def start(self, data: str) -> None:
        head = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self._temporary}"]
        self._node("trainer", *head)
        self._await_node(1)
        self._node("one", f"--address={self._address}:6379")
        self._await_node(2)
        program = [sys.executable, str(HERE / "hosts_ray_driver.py"), self._address, data]
        self.driver = self._run("trainer", program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, order: str) -> Any:
        assert self.driver.stdin is not None
        assert self.driver.stdout is not None
        print(order, file=self.driver.stdin, flush=True)
        line = self.driver.stdout.readline()
        assert line, self.driver.communicate()
        return json.loads(line)

    def close(self) -> None:
        for process in reversed(self._running):
            if process.stdin is not None:
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15.0 if process.stdin is not None else 0.1)
            process.terminate()
        for process in self._running:
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:  # a node that lost its head takes longer
                process.kill()
                process.wait(20.0)
            if process.stdout is not None:
                process.stdout.close()

    def _node(self, host: str, *options: str) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        here = [f"--node-ip-address={self.network.address[host]}", "--num-cpus=1", "--disable-usage-stats"]
        here += [f'--resources={{"{host}": 1}}', "--object-store-memory=200000000", "--block"]
        self._run(host, [ray, "start", *here, *options], stdout=subprocess.DEVNULL)

    def _await_node(self, count: int) -> None:
        program = f"""import ray
ray.init(address="{self._address}:6379", _node_ip_address="{self._address}", log_to_driver=False)
raise SystemExit(len(ray.nodes()) < {count})"""
        deadline = time.monotonic() + 60.0
        while self._run("trainer", [sys.executable, "-c", program], stdout=subprocess.DEVNULL).wait() != 0:
            assert time.monotonic() < deadline, "the nodes of Ray did not start"

    def _run(self, host: str, program: list[str], **pipes: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.network.namespace(host), *program],
            env=_environment() | {"WEIGHT_UPDATE_HOST": host},
            stderr=subprocess.DEVNULL,
            text=True,
            **pipes,
        )
        self._running.append(process)
        return process


def _environment() -> dict[str, str]:
    """Return the environment: no proxy for these hosts, and the token that Ray needs beyond loopback."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return {
        **kept,
        "PYTHONPATH": str(HERE.parents[1]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0123456789abcdef" * 2,
    }


@pytest.fixture
def cluster(procs: HostsProcesses) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(
        prefix="ray", ignore_cleanup_errors=True
    ) as place:  # sockets: short names
        made = Cluster(procs, place)
        try:
            yield made
        finally:
            made.close()


def check(cluster: Cluster) -> None:
    """Check that both actors, each on its host, have the trainer's weights."""
    found = cluster.ask("weights")
    hosts = [cluster.network.address[name] for name in ("trainer", "one")]
    assert found["theirs"] == [[host, found["mine"]] for host in hosts]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("data", ["torch", "object_store"])
def test_updates_reach_actors_on_another_host(data: str, cluster: Cluster) -> None:
    cluster.start(data)
    check(cluster)
    for version in (1, 2, 3):
        assert cluster.ask("send") == {"version": version}
        check(cluster)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_link_that_fails_and_comes_back(cluster: Cluster) -> None:
    cluster.start("torch")
    assert cluster.ask("send") == {"version": 1}
    cluster.network.pull("one")
    assert cluster.ask("send") == {"failed": [1]}
    cluster.network.plug("one")
    wait_until(lambda: cluster.ask("versions")["1"] == 2, 60.0)
    check(cluster)
    assert cluster.ask("send") == {"version": 3}
    check(cluster)
