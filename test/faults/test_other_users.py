"""Workers of another user on the sender's host."""

from __future__ import annotations

import os

import pytest
from faults_tools import START, WAIT, Crew, Remote, Stripes, Worker, WorkerRaised, fill, join

from weight_update import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SyncFailedError,
    WeightSyncScheme,
)

NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")


def large() -> Stripes:
    return Stripes(2, 50_000)  # not sent with its signal


def become_nobody(me: Worker) -> None:
    """Become another user; the kernel then hides the files of this process even from its own user."""
    import encodings.idna  # noqa: F401 - the interpreter may lie where that user cannot read

    os.setgid(NOBODY)
    os.setuid(NOBODY)


def look(me: Worker) -> set[float]:
    return set(me.model(START).tolist())


def start(crew: Crew, scheme: WeightSyncScheme, users: list[int]) -> list[Remote]:
    scheme.init_on_sender(model=large(), num_workers=len(users), ctx=crew._ctx)
    workers = [crew.start(scheme, idx, large) for idx in range(len(users))]
    for worker, user in zip(workers, users, strict=True):
        if user:
            worker.call(become_nobody)
        worker.begin(join)
    return workers


def test_they_get_weights_as_if_on_other_hosts(crew: Crew) -> None:
    scheme = crew.scheme(DistributedWeightSyncScheme, timeout=20.0)
    workers = start(crew, scheme, [0, NOBODY, NOBODY])
    scheme.connect(timeout=WAIT)
    for worker in workers:
        worker.result()
    for version in (1, 2):
        scheme.send(fill(large(), version))
        assert [worker.call(look) for worker in workers] == [{float(version)}] * 3


def test_a_sender_with_hidden_files_meets_its_workers_by_their_sockets(crew: Crew) -> None:
    crew_of_nobody = crew._ctx.Process(target=_send_to_one_of_the_same_user)
    crew_of_nobody.start()
    crew_of_nobody.join(WAIT)
    assert crew_of_nobody.exitcode == 0


def _send_to_one_of_the_same_user() -> None:
    become_nobody(None)
    crew = Crew()
    scheme = crew.scheme(DistributedWeightSyncScheme, timeout=20.0)
    (worker,) = crew.launch(scheme, large(), large, 1)
    scheme.send(fill(large(), 1))
    assert worker.call(look) == {1.0}
    assert scheme.network_bytes == 0
    crew.close()


def test_queues_cannot_reach_them_and_say_why(crew: Crew) -> None:
    scheme = crew.scheme(MultiProcessWeightSyncScheme, timeout=20.0)
    workers = start(crew, scheme, [NOBODY])
    with pytest.raises(SyncFailedError, match="run both as one user"):
        scheme.connect(timeout=WAIT)
    with pytest.raises(WorkerRaised, match="UnreachableMemoryError"):
        workers[0].result()
