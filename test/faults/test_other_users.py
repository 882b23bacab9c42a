"""Workers of another user on the sender's host."""

from __future__ import annotations

import os

import pytest
from faults_tools import START, WAIT, Processes, Remote, Stripes, Worker, WorkerRaised, fill, join

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


def start(procs: Processes, scheme: WeightSyncScheme, users: list[int]) -> list[Remote]:
    scheme.init_on_sender(model=large(), num_workers=len(users), ctx=procs._ctx)
    workers = [procs.start(scheme, idx, large) for idx in range(len(users))]
    for worker, user in zip(workers, users, strict=True):
        if user:
            worker.call(become_nobody)
        worker.begin(join)
    return workers


def test_they_get_weights_as_if_on_other_hosts(procs: Processes) -> None:
    scheme = procs.scheme(DistributedWeightSyncScheme, timeout=20.0)
    workers = start(procs, scheme, [0, NOBODY, NOBODY])
    scheme.connect(timeout=WAIT)
    for worker in workers:
        worker.result()
    for version in (1, 2):
        scheme.send(fill(large(), version))
        assert [worker.call(look) for worker in workers] == [{float(version)}] * 3


def test_a_sender_with_hidden_files_meets_its_workers_by_their_sockets(procs: Processes) -> None:
    sender_of_nobody = procs._ctx.Process(target=_send_to_one_of_the_same_user)
    sender_of_nobody.start()
    sender_of_nobody.join(WAIT)
    assert sender_of_nobody.exitcode == 0


def _send_to_one_of_the_same_user() -> None:
    become_nobody(None)
    procs = Processes()
    scheme = procs.scheme(DistributedWeightSyncScheme, timeout=20.0)
    (worker,) = procs.launch(scheme, large(), large, 1)
    scheme.send(fill(large(), 1))
    assert worker.call(look) == {1.0}
    assert scheme.network_bytes == 0
    procs.close()


def test_queues_cannot_reach_them_and_say_why(procs: Processes) -> None:
    scheme = procs.scheme(MultiProcessWeightSyncScheme, timeout=20.0)
    workers = start(procs, scheme, [NOBODY])
    with pytest.raises(SyncFailedError, match="run both as one user"):
        scheme.connect(timeout=WAIT)
    with pytest.raises(WorkerRaised, match="UnreachableMemoryError"):
        workers[0].result()
