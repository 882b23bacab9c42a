"""Workers beyond the first number, over every scheme that can have them."""

from typing import Any

import pytest

from weight_update import (
    DistributedWeightSyncScheme,
    LifecycleError,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    PatchEncoding,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
)
from weight_update.testing import Crew, NewcomerContract, mlp
from weight_update.testing.newcomers import KilledNewcomerTests
from weight_update.testing.workers import context_of


class TestSharedMem(NewcomerContract, KilledNewcomerTests):
    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return SharedMemWeightSyncScheme(**options)


class TestDistributed(NewcomerContract, KilledNewcomerTests):
    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return DistributedWeightSyncScheme(**options)


@pytest.mark.slow
class TestPatches(NewcomerContract, KilledNewcomerTests):
    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return SharedMemWeightSyncScheme(WeightStrategy(encoding=PatchEncoding()), **options)


class TestMemory(NewcomerContract):
    method = "thread"
    returns = False

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return MemoryWeightSyncScheme(**options)


def test_queues_must_exist_before_the_process() -> None:
    scheme = MultiProcessWeightSyncScheme()
    scheme.init_on_sender(model=mlp(1), num_workers=1, ctx=context_of("fork"))
    with Crew(scheme) as crew:
        crew.hire(0, mlp(2))
        crew.connect()
        crew.hire(1, mlp(3))
        with pytest.raises(LifecycleError, match="no queues for worker 1"):
            crew.workers[1].call("connect")
        scheme.send(mlp(4))
