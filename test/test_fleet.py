"""A fleet: some engines always restart, some are busy or suspended, and the trainer goes on."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from fleet_parts import LIMIT, MODEL_BYTES, Fleet, Usage, Watched
from marks import slow

from weight_update import (
    DistributedWeightSyncScheme,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    WeightSyncScheme,
)
from weight_update.testing.processes import eventually, freeze, wait_until

HELD, FROZEN = (1, 2, 3), 4
SLOW = (*HELD, FROZEN)
REMEMBERED = 64
"""Number of updates whose errors, and whose workers, a trainer with ``sync=False`` remembers."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("kind", "count", "restarts"),
    [
        slow(SharedMemWeightSyncScheme, 8, 6),
        slow(DistributedWeightSyncScheme, 8, 6),
        slow(SharedMemWeightSyncScheme, 100, 60),
        slow(DistributedWeightSyncScheme, 100, 60),
    ],
)
@pytest.mark.timeout(600)
def test_engines_that_come_and_go(
    kind: type[WeightSyncScheme], count: int, restarts: int, stack: ExitStack
) -> None:
    fleet = Fleet(kind, count, stack)
    trainer = stack.enter_context(ThreadPoolExecutor(1))
    before = slow_down(fleet, trainer)
    rng = random.Random(count)
    used: list[Usage] = []
    for _ in range(2):  # the first one warms up
        trainer.submit(come_and_go, fleet, rng, restarts).result(LIMIT + restarts)
        fleet.send()
        fleet.reach(but=SLOW)
        newest = {int(index): (True, fleet.version, 0) for index in fleet.board.index}
        lag = {place: (True, version, fleet.version - version) for place, version in before.items()}
        await_watched(fleet, newest | lag)
        used.append(fleet.usage())
    # what lives on after a restart would grow with each of them
    growth = used[-1] - used[0]
    assert growth.pop("memory", 0) < 4 * MODEL_BYTES, growth
    assert all(count < restarts for count in growth.values()), growth
    assert dict(zip(SLOW, fleet.board.version[list(SLOW)], strict=True)) == before

    fleet.board.hold[:] = 0
    os.kill(fleet.board.pid[FROZEN], signal.SIGCONT)
    fleet.reach()
    await_watched(fleet, {int(index): (True, fleet.version, 0) for index in fleet.board.index})
    assert (fleet.board.torn.sum(), fleet.board.failed.sum()) == (0, 0)


def test_an_engine_that_dies_while_it_lacks_several_updates_is_named_by_one_send(stack: ExitStack) -> None:
    fleet = Fleet(SharedMemWeightSyncScheme, 2, stack)
    fleet.hold(1)  # no update is settled from now on
    freeze(fleet.board.pid[0])
    for _ in range(5):
        fleet.scheme.send()
    fleet.launcher.call("kill", 0)
    wait_until(lambda: list(fleet.scheme.worker_versions) == [1])
    failures = []
    for _ in range(10):
        try:
            fleet.scheme.send()
        except SyncFailedError as error:
            failures.append(list(error.failures))
    assert failures == [[0]]


def await_watched(fleet: Fleet, expected: Watched) -> None:
    """Wait until ``weight-update watch`` lists exactly these workers."""
    if not eventually(lambda: fleet.watched() == expected, LIMIT):
        assert fleet.watched() == expected


def slow_down(fleet: Fleet, trainer: ThreadPoolExecutor) -> dict[int, int]:
    """Make some engines busy at different versions; return the version of each.

    ``timeout`` is a minute: the trainer would wait so long if it waited for any of them.
    """
    versions = {}
    for place in SLOW:
        if place == FROZEN:
            freeze(fleet.board.pid[place])
        else:
            trainer.submit(fleet.hold, place).result(LIMIT)
        versions[place] = int(fleet.board.version[place])
        for _ in range(2):
            trainer.submit(fleet.send).result(LIMIT / 2)
            fleet.reach(but=SLOW[: SLOW.index(place) + 1])
    return versions


def come_and_go(fleet: Fleet, rng: random.Random, restarts: int) -> None:
    """Restart engines and send meanwhile; every other one joins under an index of its own."""
    always = range(len(SLOW) + 1, max(len(SLOW) + 3, len(fleet.board.pid) // 8))
    for number in range(restarts):
        fleet.restart(rng.choice(always), fresh=number % 2 == 1)
        fleet.send()
    for _ in range(REMEMBERED):
        fleet.send()
