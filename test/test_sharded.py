"""A trainer whose ranks hold parts of the model: all call send(), one of them talks to the workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from shard_parts import BUCKETS, Ranks, running


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        ranks.all("group", [0, 1])
        ranks.all("group", [0, 1, 2, 3])
        yield ranks


def same(fingerprint: dict[str, str], expected: dict[str, str]) -> bool:
    return {name: fingerprint[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("kind", "size", "workers", "options"),
    [
        ("distributed", 2, 3, BUCKETS),
        ("distributed", 4, 2, BUCKETS),
        ("shared_mem", 2, 2, {}),
        ("shared_mem", 2, 1, {"encoding": "patch"}),
    ],
)
def test_workers_have_the_weights_of_all_ranks(
    four: Ranks, kind: str, size: int, workers: int, options: dict[str, Any]
) -> None:
    four.all("make", 1, size, of=size)
    with running(four, kind, size=size, workers=workers, **options) as crew:
        for steps in (1, 2):
            four.all("train", steps, of=size)
            reports = four.all("call", "send", of=size)
            expected = four.all("whole", of=size)[0]
            assert [report.version for report in reports] == [steps] * size
            assert all(same(worker.call("fingerprint"), expected) for worker in crew)
        assert four.all("get", "version", of=size) == [2] * size
        assert four.all("get", "worker_versions", of=size) == [dict.fromkeys(range(workers), 2)] * size
