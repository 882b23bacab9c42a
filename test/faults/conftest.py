from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from background import one_thread
from faults_kinds import kinds
from faults_tools import Processes

from weight_update import WeightSyncScheme


@pytest.fixture(params=kinds("shared_mem", "distributed"))
def kind(request: pytest.FixtureRequest) -> type[WeightSyncScheme]:
    """The class of the scheme under test."""
    return request.param


@pytest.fixture
def procs() -> Iterator[Processes]:
    """Starts workers, and ends them whatever happens."""
    with one_thread(), closing(Processes()) as procs:
        yield procs
