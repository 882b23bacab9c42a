"""The faults of this folder once more, with workers that share no memory with the sender."""

from __future__ import annotations

import os

import pytest
from test_apply_errors import *  # noqa: F403
from test_kills import *  # noqa: F403
from test_stopped_worker import *  # noqa: F403
from test_slow_receiver import *  # noqa: F403
from test_torn_reads import *  # noqa: F403
from test_isolation import *  # noqa: F403

from weight_update import DistributedWeightSyncScheme


class Apart(DistributedWeightSyncScheme):
    """Every process believes to be a host of its own."""

    def host_name(self) -> str:
        return f"host of {os.getpid()}"


@pytest.fixture
def kind():
    return Apart
