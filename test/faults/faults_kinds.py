"""The schemes over which the tests of faults run."""

from __future__ import annotations

import pytest

from weight_update import DistributedWeightSyncScheme, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

_KINDS = {
    "shared_mem": SharedMemWeightSyncScheme,
    # Queues have the slots and the gate of shared_mem; only how workers find the sender differs.
    "queues": MultiProcessWeightSyncScheme,
    "distributed": DistributedWeightSyncScheme,
}


def kinds(*quick: str) -> list[pytest.param]:
    """Return all schemes as parameters; all but those named ``quick`` are marked slow."""
    return [
        pytest.param(kind, id=name, marks=[] if name in quick else pytest.mark.slow)
        for name, kind in _KINDS.items()
    ]


def quick_over(*quick: str) -> pytest.MarkDecorator:
    """Make a test that uses the fixture ``kind`` slow over all schemes but those named."""
    return pytest.mark.parametrize("kind", kinds(*quick), indirect=True)
