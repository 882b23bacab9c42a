"""Workers of a MultiCollector that end or hang while they collect, or while they start."""

import gc
import logging
import os
import re
import signal
import sys
import time
from functools import partial
from multiprocessing.queues import Queue

import pytest
from collector_parts import OPTIONS, Env, fill, make_policy, require_exact, weights_of
from marks import quick_for, slow
from test_collectors_end import Dies, ours
from torchrl.collectors.utils import _TrajectoryPool

from collectors import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from collectors.torchrl_names import multi_base
from weight_update import MultiProcessWeightSyncScheme, SyncFailedError, SyncTimeoutError, WorkerError
from weight_update.testing.processes import freeze, wait_until


def make(cls, workers=2, **options):
    return cls([Env] * workers, make_policy(), frames_per_batch=8, total_frames=-1, **{**OPTIONS, **options})


def read(frames, limit=2000):
    """Go on until an error comes."""
    for _ in range(limit):
        next(frames)
    raise AssertionError("no error came")


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_a_killed_worker_is_named_with_its_exit_code(cls, made):
    collector = made(make, cls)
    frames = collector.iterator()  # iter() would give a stopped worker ten seconds to end
    next(frames)
    collector.procs[1].kill()
    with pytest.raises(WorkerError, match=r"worker 1 has ended \(exit code -9, SIGKILL, often the kernel"):
        read(frames)


class Fails(Env):
    """An environment whose third step raises an error."""

    steps = 0

    def _step(self, tensordict):
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("the simulator crashed")
        return super()._step(tensordict)


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_the_exception_that_ends_a_worker_reaches_every_call(cls, made):
    collector = made(cls, [Env, Fails], make_policy())
    trace = r"(?s)worker 1 has ended \(exit code 1\):\nTraceback .*Error: the simulator crashed"
    with pytest.raises(WorkerError, match=trace):
        read(collector.iterator())
    with pytest.raises(WorkerError, match=trace):
        collector.state_dict()
    with pytest.raises(SyncFailedError) as caught:
        collector.update_policy_weights_()
    assert list(caught.value.failures) == [1]
    if sys.version_info >= (3, 11):
        assert re.match(trace, caught.value.__notes__[0])


@pytest.mark.parametrize("cls", [MultiSyncCollector, slow(MultiAsyncCollector)])
def test_a_worker_whose_connection_is_gone_does_not_keep_others_from_ending(cls):
    collector = make(cls)
    processes = [process._original for process in collector.procs]
    collector.pipes[0]._original.close()  # as when the process was killed, and has not been reaped yet
    collector.shutdown()
    assert [process.is_alive() for process in processes] == [False, False]


@pytest.mark.parametrize("cls", [MultiSyncCollector, slow(MultiAsyncCollector)])
def test_waiting_for_a_stopped_worker_has_a_limit(cls):
    collector = make(cls, frames_timeout=1.5)
    try:
        frames = collector.iterator()
        next(frames)
        freeze(collector.procs[1].pid)
        freeze(collector.procs[0].pid) if cls is MultiAsyncCollector else None
        start = time.monotonic()
        with pytest.raises(SyncTimeoutError, match=r"workers \[.*1\] .*1\.5 s"):
            read(frames)
        assert time.monotonic() - start > 1
    finally:
        for process in collector.procs:
            os.kill(process.pid, signal.SIGCONT)
        collector.shutdown()


@pytest.mark.timeout(60)
def test_a_call_of_a_stopped_worker_has_a_limit(made):
    collector = made(make, MultiSyncCollector, frames_timeout=1.5)
    freeze(collector.procs[1].pid)
    try:
        with pytest.raises(SyncTimeoutError, match=r"worker 1 did not answer a call in 1\.5 s"):
            collector.state_dict()
    finally:
        os.kill(collector.procs[1].pid, signal.SIGCONT)
    assert set(collector.state_dict()) >= {"worker0", "worker1"}


@pytest.mark.slow
def test_time_between_batches_does_not_count(made):
    collector = made(make, MultiAsyncCollector, frames_timeout=0.5)
    frames = collector.iterator()
    next(frames)
    time.sleep(1.0)
    for _ in range(6):
        next(frames)


def test_collection_goes_on_without_a_killed_worker(caplog, made):
    collector = made(make, MultiAsyncCollector, on_worker_lost="continue")
    frames = collector.iterator()
    next(frames)
    os.kill(collector.procs[1].pid, signal.SIGKILL)
    with caplog.at_level(logging.WARNING, "collectors"):
        for _ in range(20):
            require_exact(next(frames))
    assert [one.getMessage() for one in caplog.records] == [
        "collection goes on without worker 1, which has ended "
        "(exit code -9, SIGKILL, often the kernel when memory ran out)"
    ]
    for version in (1, 2):
        report = collector.update_policy_weights_(fill(make_policy(), version))
        assert report.version == version
        assert sorted(report.apply_seconds) == [0]
    while next(frames)["policy_version"].min() < 2:
        pass
    require_exact(next(frames))
    with pytest.raises(WorkerError, match="worker 1 has ended"):
        collector.state_dict()
    os.kill(collector.procs[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="no worker is left"):
        read(frames)


class DiesWithALock(Env):
    """The environment of a worker that is killed while it has what workers share for an instant.

    ``find`` returns the lock, and ``steps`` is the number of the step on which it happens.
    """

    def __init__(self, find, steps=20):
        super().__init__()
        self.find, self.left = find, steps

    def _step(self, tensordict):
        self.left -= 1
        if not self.left:
            self.find().acquire()
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._step(tensordict)


def the_one(cls):
    """Return the only object of this class in this process."""
    (found,) = (one for one in gc.get_objects() if isinstance(one, cls))
    return found


LOCKS = {
    "while it writes to the queue": lambda: the_one(Queue)._wlock,
    "before it writes to the queue": lambda: the_one(Queue)._sem,
    "while it numbers a trajectory": lambda: the_one(_TrajectoryPool).lock,
}


@pytest.mark.parametrize("find", quick_for(LOCKS.values(), LOCKS["while it writes to the queue"]), ids=LOCKS)
def test_collection_goes_on_without_a_worker_that_was_killed_with_a_lock(find, made):
    envs = [Env, partial(DiesWithALock, find), Env]
    collector = made(MultiAsyncCollector, envs, make_policy(), on_worker_lost="continue")
    frames = collector.iterator()
    while 1 not in collector.queue_out.lost:
        next(frames)
    for _ in range(20):
        require_exact(next(frames))


def test_collection_goes_on_without_a_worker_that_was_killed_before_its_first_batch_was_read(made):
    collector = made(make, MultiAsyncCollector, on_worker_lost="continue")
    frames = collector.iterator()
    next(frames)
    (first,) = collector.out_tensordicts
    while collector.queue_out.qsize() < 2:
        time.sleep(0.01)
    time.sleep(0.2)  # until the batches that were put are in the pipe as well
    lost = 1 - first
    collector.procs[lost].kill()
    collector.procs[lost].join(10.0)
    for _ in range(20):
        require_exact(next(frames))
    assert set(collector.queue_out.lost) == {lost}


def test_collection_goes_on_without_a_stopped_worker(made):
    collector = made(make, MultiAsyncCollector, on_worker_lost="continue", frames_timeout=3.0)
    frames = collector.iterator()
    while len(collector.out_tensordicts) < 2:  # later batches lie in memory that is mapped here already
        next(frames)
    freeze(collector.procs[0].pid)
    deadline = time.monotonic() + 60
    while 0 not in collector.queue_out.lost and time.monotonic() < deadline:
        next(frames)
    assert set(collector.queue_out.lost) == {0}
    require_exact(next(frames))


def test_the_report_is_that_of_this_update_if_nobody_waits_for_it(made):
    scheme = MultiProcessWeightSyncScheme(sync=False)
    collector = made(
        make, MultiAsyncCollector, on_worker_lost="continue", weight_sync_schemes={"policy": scheme}
    )
    next(collector.iterator())
    os.kill(collector.procs[1].pid, signal.SIGKILL)
    collector.procs[1].join(10.0)
    versions = []
    for number in range(1, 6):
        versions.append(collector.update_policy_weights_(weights_of(float(number))).version)
        wait_until(lambda: scheme.worker_versions[0] == versions[-1])
    assert versions == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_several_models_are_updated_without_a_lost_worker(made):
    policy = make_policy()
    scheme = MultiProcessWeightSyncScheme()
    collector = made(
        make, MultiAsyncCollector, on_worker_lost="continue", weight_sync_schemes={"policy": scheme}
    )
    frames = collector.iterator()
    next(frames)
    os.kill(collector.procs[1].pid, signal.SIGKILL)
    reports = collector.update_policy_weights_(weights_dict={"policy": fill(policy, 1.0)})
    assert sorted(reports["policy"].apply_seconds) == [0]
    collector.update_policy_weights_(weights_of(5.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frames_timeout": 0}, "frames_timeout is a positive number"),
        ({"frames_timeout": None}, "frames_timeout is a positive number"),
        ({"on_worker_lost": "restart"}, 'on_worker_lost is "raise" or "continue"'),
        ({"on_worker_lost": "continue"}, "needs a MultiAsyncCollector"),
    ],
)
def test_what_cannot_be_had_is_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        make(MultiSyncCollector, **options)


def test_the_choice_of_a_class_passes_the_policy_on():
    with pytest.raises(ValueError, match="needs a MultiAsyncCollector"):
        make(MultiCollector, sync=True, on_worker_lost="continue")


def test_updates_are_no_slower_once_a_worker_is_lost(made):
    collector = made(make, MultiAsyncCollector, on_worker_lost="continue")
    frames = collector.iterator()
    next(frames)
    collector.procs[1].kill()
    while 1 not in collector.queue_out.lost:
        next(frames)
    collector.update_policy_weights_()
    waits = []
    for _ in range(3):
        start = time.monotonic()
        collector.update_policy_weights_()
        waits.append(time.monotonic() - start)
    assert min(waits) < 0.9


def test_a_worker_without_a_scheme_that_dies_while_it_starts_is_named():
    message = r"^workers could not start:\nworker 1 has ended \(exit code -9, SIGKILL"
    with pytest.raises(WorkerError, match=message):
        MultiSyncCollector([Env, Dies], None, frames_per_batch=8, **OPTIONS)
    assert ours() == []


class HangsAtReset(Env):
    def _reset(self, tensordict=None):
        time.sleep(600.0)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_waiting_for_a_worker_that_hangs_while_it_starts_has_a_limit(monkeypatch):
    monkeypatch.setattr("collectors.multi.FRAMES_TIMEOUT", 1.0)
    monkeypatch.setattr(multi_base, "INSTANTIATE_TIMEOUT", 1.0)
    options = {"frames_per_batch": 8, "frames_timeout": 3.0, **OPTIONS}
    with pytest.raises(SyncTimeoutError, match="worker 1 did not start in 3 s"):
        MultiSyncCollector([Env, HangsAtReset], make_policy(), **options)
    assert ours() == []
