"""Ray: actors as workers, over both ways of data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from weight_update import RayWeightSyncScheme, WeightSyncScheme
from weight_update.testing import NewcomerContract, SchemeContract

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "weight-update[ray]"')


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for the module."""
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=300 << 20, log_to_driver=False)
    yield
    ray.shutdown()


class TestTorch(SchemeContract):
    method = "ray"

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return RayWeightSyncScheme(**options)


class TestObjectStore(SchemeContract):
    method = "ray"

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return RayWeightSyncScheme(data="object_store", **options)


class TestNewcomers(NewcomerContract):
    method = "ray"

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return RayWeightSyncScheme(data="object_store", **options)
