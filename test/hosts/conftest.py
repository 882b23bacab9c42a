from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a child forked after OpenMP ran hangs in its own parallel loops
    procs = HostsProcesses(network)
    try:
        yield procs
    finally:
        procs.close()
        torch.set_num_threads(threads)
