"""Workers of another user on the sender's host."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest
from faults_tools import START, WAIT, Processes, Remote, Stripes, Worker, WorkerRaised, fill, join
from test_pid_namespaces import go_on_in_child

from weight_update import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SyncFailedError,
    TransportError,
    WeightSyncScheme,
)
from weight_update.transports import host_name

NOBODY, CLONE_NEWUSER = 65534, 0x10000000

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")


def large() -> Stripes:
    return Stripes(2, 50_000)  # not sent with its signal


def become_nobody(me: Worker) -> None:
    """Become another user; the kernel then hides the files of this process even from its own user."""
    import encodings.idna  # noqa: F401 - the interpreter may lie where that user cannot read

    os.setgid(NOBODY)
    os.setuid(NOBODY)


def join_from_user_namespace(me: Worker) -> None:
    """Join from a user namespace of this process, whose files no other process of its user may open then."""
    libc = ctypes.CDLL(None, use_errno=True)
    go_on_in_child(libc)  # only a process with one thread may go to another user namespace
    assert libc.unshare(CLONE_NEWUSER) == 0, os.strerror(ctypes.get_errno())
    Path("/proc/self/uid_map").write_text("0 0 1")
    me.scheme.host = None
    join(me)


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


@pytest.mark.parametrize("host", [None, "the sender's"])
def test_each_worker_in_a_user_namespace_of_its_own(procs: Processes, host: str | None) -> None:
    """Apptainer makes one for each command; the workers of another host share no memory then."""
    tried = subprocess.run(["unshare", "--user", "true"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip("this machine does not let us make a user namespace")
    scheme, model = procs.scheme(DistributedWeightSyncScheme, timeout=20.0, host=host), large()
    scheme.init_on_sender(model=model, num_workers=2)
    workers = [procs.start(scheme, idx, large) for idx in range(2)]
    for worker in workers:
        worker.begin(join_from_user_namespace)
    scheme.connect(timeout=WAIT)
    for worker in workers:
        worker.result()
    for version in (1, 2):
        scheme.send(fill(model, version))
        assert [worker.call(look) for worker in workers] == [{float(version)}] * 2
    assert (scheme.network_bytes > 0) is (host is not None)


def test_a_system_that_hides_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a proc file system with subset=pid does."""

    def read_text(path: Path, *_: object, **__: object) -> str:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(host_name.Path, "read_text", read_text)
    with pytest.raises(TransportError, match=r"boot_id.*give host=.*WEIGHT_UPDATE_HOST"):
        DistributedWeightSyncScheme().init_on_sender(model=large(), num_workers=1)
    with DistributedWeightSyncScheme(host="mine") as scheme:
        scheme.init_on_sender(model=large(), num_workers=1)


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
