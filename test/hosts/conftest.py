from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import cache

import pytest
from background import one_thread
from hosts_processes import HostsProcesses

from benchmarks.network import Network, why_not

refused = cache(why_not)


@pytest.fixture
def network() -> Iterator[Network]:
    """Make three hosts; this thread is on the first."""
    reason = refused()
    if reason is not None:
        pytest.skip(reason)
    with Network(["trainer", "one", "two"]) as network, network.inside("trainer"):
        yield network


@pytest.fixture
def procs(network: Network, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostsProcesses]:
    """Start workers on hosts, and end them after the test."""
    monkeypatch.setenv("WEIGHT_UPDATE_HOST", "trainer")  # they all have the boot id of this machine
    with one_thread(), closing(HostsProcesses(network)) as procs:
        yield procs
