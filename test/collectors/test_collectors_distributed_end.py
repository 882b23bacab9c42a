"""DistributedCollector and DistributedSyncCollector: workers that fail, and the end."""

import _thread
import collections
import multiprocessing
import os
import signal
import textwrap
import threading
import time
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path

import psutil
import pytest
import torch
from collector_parts import Env, Slow, fill, make_policy, require_stamps, weights_of
from interpreters import run_python
from marks import slow
from tensordict import TensorDict
from test_collectors_distributed import make, used
from test_collectors_end import Dies, Fails, ours, require_end_by_another_thread
from torchrl.data import Unbounded

from collectors.nodes import Nodes
from weight_update import (
    LifecycleError,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    SyncTimeoutError,
    WorkerError,
)
from weight_update.testing.processes import eventually, freeze, wait_until

ROOT = Path(__file__).parents[2]


def pause(seconds):
    time.sleep(seconds)


def nothing_is_left():
    return eventually(lambda: not ours(), 5.0) and not torch.distributed.is_initialized()


@pytest.mark.parametrize("kind", ["async", slow("ahead")])
def test_shutdown_ends_workers_threads_and_schemes(kind):
    scheme = SharedMemWeightSyncScheme()
    collector = make(kind, make_policy(), weight_sync_schemes={"policy": scheme})
    next(iter(collector))
    workers = [psutil.Process(process.pid) for process in collector.jobs]
    start = time.monotonic()
    collector.shutdown()
    collector.shutdown()
    assert time.monotonic() - start < 5
    assert not any(worker.is_running() for worker in workers)
    assert nothing_is_left()
    for update in (scheme.send, collector.update_policy_weights_):
        with pytest.raises(LifecycleError, match="was shut down"):
            update()


@pytest.mark.parametrize("kind", ["async", slow("sync"), "ahead"])
def test_a_shutdown_by_another_thread_ends_an_iteration(kind):
    require_end_by_another_thread(make(kind, make_policy()))
    assert nothing_is_left()


@pytest.mark.parametrize("kind", ["sync", slow("ahead")])
def test_ctrl_c_while_the_group_forms(kind, monkeypatch):
    form = torch.distributed.init_process_group

    def form_late(*args, **options):
        os.kill(os.getpid(), signal.SIGINT)
        pause(1.0)
        form(*args, **options)

    monkeypatch.setattr(torch.distributed, "init_process_group", form_late)
    with pytest.raises(KeyboardInterrupt):
        make(kind, make_policy())
    monkeypatch.undo()
    assert nothing_is_left()
    collector = make(kind, make_policy())
    next(iter(collector))
    collector.shutdown()
    assert nothing_is_left()


def interrupting(function, *, after):
    """Return a function that calls ``function``, and interrupts the program once, before or after that."""
    left = [signal.SIGINT]

    def call(*args, **options):
        if left and not after:
            os.kill(os.getpid(), left.pop())
        found = function(*args, **options)
        if left:
            os.kill(os.getpid(), left.pop())
        return found

    return call


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", ["thread", "receive"])
@pytest.mark.parametrize("kind", [slow("sync"), slow("async"), "ahead"])
def test_an_iteration_after_ctrl_c_while_a_worker_is_asked_gets_its_batch(
    kind, step, after, made, monkeypatch
):
    collector = made(make, kind, make_policy(), frames_timeout=5.0)
    next(collector.iterator())
    owner, name = {"thread": (_thread, "start_new_thread"), "receive": (TensorDict, "irecv")}[step]
    monkeypatch.setattr(owner, name, interrupting(getattr(owner, name), after=after))
    with pytest.raises(KeyboardInterrupt):
        list(zip(range(3), collector.iterator(), strict=False))
    monkeypatch.undo()
    frames = collector.iterator()
    for _ in range(4):
        require_stamps(next(frames))
    collector.shutdown()
    assert nothing_is_left()


@pytest.mark.parametrize("kind", ["sync", slow("ahead")])
def test_a_seed_is_refused_and_ends_no_worker(kind):
    collector = make(kind, make_policy())
    frames = iter(collector)
    next(frames)
    with pytest.raises(NotImplementedError, match="cannot seed its workers; seed each environment in create"):
        collector.set_seed(1)
    with pytest.raises(NotImplementedError, match="save the trainer's policy and policy_version"):
        collector.state_dict()
    next(frames)
    collector.shutdown()


def test_a_collector_that_is_dropped_ends():
    collector = make("async", make_policy())
    next(iter(collector))
    workers = [psutil.Process(process.pid) for process in collector.jobs]
    del collector
    assert not any(worker.is_running() for worker in workers)
    assert nothing_is_left()


def test_the_update_after_a_worker_was_killed_names_it():
    collector = make("sync", make_policy())
    frames = iter(collector)
    next(frames)
    collector.jobs[0].kill()
    collector.jobs[0].join()
    with pytest.raises(SyncFailedError) as caught:
        collector.update_policy_weights_(weights_of(1.0))
    assert set(caught.value.failures) == {0}
    assert sorted(caught.value.report.apply_seconds) == [1]
    start = time.monotonic()
    with pytest.raises(WorkerError, match="worker 0 has ended"):
        next(frames)
    assert time.monotonic() - start < 5
    collector.shutdown()
    assert nothing_is_left()


@pytest.mark.parametrize("kind", ["async", slow("ahead")])
def test_waiting_for_a_stopped_worker_has_a_limit(kind):
    collector = make(kind, make_policy(), frames_timeout=1.5)
    frames = collector.iterator()  # iter() would give the stopped worker ten seconds to end
    next(frames)
    freeze(collector.jobs[1].pid)
    with pytest.raises(SyncTimeoutError, match=r"no batch of workers \[1\] came in 1\.5 s"):
        collections.deque(frames, maxlen=0)
    collector.shutdown(timeout=0.5)
    assert nothing_is_left()


@pytest.mark.parametrize("kind", [slow("async"), slow("sync"), "ahead"])
def test_a_worker_killed_while_frames_are_awaited_is_named(kind):
    collector = make(kind, make_policy(), envs=[Env, Slow])
    frames = iter(collector)
    next(frames)
    os.kill(collector.jobs[1].pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"worker 1 has ended \(exit code -9, SIGKILL, often the kernel"):
        list(zip(range(100), frames, strict=False))
    assert time.monotonic() - start < 10
    assert nothing_is_left()


def test_a_worker_that_was_ahead_ends_after_another_was_killed():
    collector = make("ahead", make_policy())
    frames = collector.iterator()  # iter() would shut down at once
    next(frames)
    collector.jobs[1].kill()
    collector.jobs[1].join()
    pause(0.2)  # gloo notices it
    with pytest.raises(WorkerError, match="worker 1 has ended"):
        next(frames)
    pause(0.5)  # a batch of worker 0 has come meanwhile, and it sends the next one
    collector.shutdown()
    assert collector.jobs[0].exitcode == 0
    assert nothing_is_left()


class Breaks(Env):
    def _step(self, tensordict):
        if multiprocessing.parent_process() is not None and self.count == 3:
            raise ZeroDivisionError("this environment broke")
        return super()._step(tensordict)


@pytest.mark.parametrize("kind", [slow("async"), slow("sync"), "ahead"])
def test_what_a_worker_raises_while_it_collects_is_told(kind):
    with pytest.raises(WorkerError, match=r"worker 1(.|\n)*this environment broke"):
        list(zip(range(100), make(kind, make_policy(), envs=[Env, Breaks]), strict=False))
    assert nothing_is_left()


class Sized(Env):
    def __init__(self, size):
        super().__init__()
        self.size = size
        self.observation_spec["more"] = Unbounded((size,))

    def _reset(self, tensordict=None):
        return super()._reset(tensordict).set("more", torch.zeros(self.size))

    def _step(self, tensordict):
        return super()._step(tensordict).set("more", torch.zeros(self.size))


@pytest.mark.parametrize("kind", ["sync", slow("ahead")])
def test_a_worker_whose_batches_the_trainer_cannot_receive_is_named(kind):
    envs = [partial(Sized, 3), partial(Sized, 2)]
    with pytest.raises(WorkerError, match=r"worker 1(.|\n)*same specs.* more is \[4, 2\] .* \[4, 3\]"):
        next(iter(make(kind, make_policy(), envs=envs)))
    assert nothing_is_left()


@pytest.mark.parametrize("kind", [slow("sync"), "ahead"])
def test_what_a_worker_raises_before_it_connects_is_told(kind):
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"worker 1: (.|\n)*this environment is broken"):
        make(kind, make_policy(), envs=[Env, Fails])
    assert time.monotonic() - start < 30
    assert nothing_is_left()


def test_a_worker_that_dies_before_it_connects_is_named():
    # the group may be formed by then or not
    with pytest.raises((SyncFailedError, WorkerError), match=r"worker 1:? .*ended") as caught:
        make("sync", make_policy(), envs=[Env, Dies])
    assert "worker 0" not in str(caught.value)
    assert nothing_is_left()


class Unreadable(torch.nn.Linear):
    """Cannot be made in a worker."""

    def __setstate__(self, state):
        raise ZeroDivisionError("this policy cannot be read")


@pytest.mark.parametrize("kind", ["sync", "ahead"])
def test_what_a_worker_cannot_read_is_told_before_the_group_is_formed(kind):
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"worker \d(.|\n)*this policy cannot be read"):
        make(kind, Unreadable(2, 2))
    assert time.monotonic() - start < 30
    assert nothing_is_left()


def test_a_worker_that_hangs_is_killed_at_the_end():
    collector = make("async", make_policy())
    next(iter(collector))
    process = psutil.Process(collector.jobs[1].pid)
    process.suspend()
    start = time.monotonic()
    collector.shutdown(timeout=0.5)
    assert time.monotonic() - start < 10
    assert not process.is_running()
    assert nothing_is_left()


@pytest.mark.parametrize(
    ("seconds", "error", "text"),
    [
        (0.5, WorkerError, "worker 0 has ended"),
        (30.0, SyncTimeoutError, "not form a process group in 1 s"),
    ],
)
def test_a_group_that_is_not_formed(seconds, error, text):
    nodes, given_up = Nodes(), threading.Event()
    nodes.start(pause, {}, seconds=seconds)
    nodes.await_ready(60.0)
    start = time.monotonic()
    try:
        with pytest.raises(error, match=text):
            nodes.attend(given_up.wait, 1.0 if error is SyncTimeoutError else 60.0)
    finally:
        given_up.set()
        nodes.kill()
    assert time.monotonic() - start < 20.0


def fail_and_end_late(seconds):
    Finalize(None, pause, [seconds], exitpriority=0)
    raise ZeroDivisionError("this worker broke")


def test_what_a_worker_raised_is_told_before_its_process_has_ended(monkeypatch):
    monkeypatch.setattr("collectors.nodes._JOIN_SECONDS", 1.0)
    nodes = Nodes()
    nodes.start(fail_and_end_late, {}, seconds=30.0)
    nodes.await_ready(60.0)
    try:
        with pytest.raises(WorkerError, match=r"worker 0: (.|\n)*this worker broke"):
            nodes.require_joined(0)
    finally:
        nodes.kill()


@pytest.mark.slow
def test_a_collector_after_a_collector():
    for value in (1.0, 2.0):
        collector = make("sync", make_policy(value))
        assert used(iter(collector)) == [value] * 2
        collector.update_policy_weights_(fill(make_policy(), 3.0))
        collector.shutdown()


PROGRAM = """
    import os
    import signal
    import sys
    sys.path.insert(0, {here!r})
    from torch import multiprocessing as torch_multiprocessing
    from collector_parts import OPTIONS, Env, make_policy, weights_of
    from collectors import DistributedCollector, DistributedSyncCollector

    if __name__ == "__main__":
        torch_multiprocessing.set_start_method("fork", force=True)  # the quickest
        options = dict(frames_per_batch=8, total_frames=-1, launcher="mp", collector_kwargs=OPTIONS)
        workers = {cls}([Env] * 2, make_policy(), **options)
        frames = iter(workers)
        next(frames)
        workers.update_policy_weights_(weights_of(1.0))
        print(*[job.pid for job in workers.jobs], flush=True)
        {end}
"""


@pytest.mark.parametrize(
    ("cls", "end", "code"),
    [
        ("DistributedSyncCollector", "raise KeyError('on purpose')", 1),
        slow("DistributedCollector", "os.kill(os.getpid(), signal.SIGKILL)", -9),
        slow("DistributedSyncCollector", "os.kill(os.getpid(), signal.SIGKILL)", -9),
    ],
)
def test_an_interpreter_ends_without_shutdown(cls, end, code, tmp_path):
    """Forgotten, by an error, or killed: neither it nor its workers stay."""
    program = tmp_path / "forgetful.py"
    program.write_text(textwrap.dedent(PROGRAM).format(here=str(Path(__file__).parent), cls=cls, end=end))
    done = run_python(program, timeout=90.0)
    assert done.returncode == code, done.stderr
    assert ("on purpose" in done.stderr) == (code == 1)
    workers = [int(pid) for pid in done.stdout.split()]
    assert len(workers) == 2
    wait_until(lambda: not any(map(psutil.pid_exists, workers)), 20.0)


QUITS = """
    import os
    import sys
    sys.path.insert(0, {here!r})
    from collector_parts import OPTIONS, Env, make_policy, use_forkserver
    from collectors import DistributedCollector
    from weight_update import WorkerError

    program = DistributedCollector._program

    def make():
        options = dict(frames_per_batch=8, total_frames=-1, launcher="mp", collector_kwargs=OPTIONS)
        return DistributedCollector([Env] * 2, make_policy(), **options)

    def quit(**options):
        if options["rank"] == 2:
            os._exit(3)
        program(**options)

    if __name__ == "__main__":
        use_forkserver()
        DistributedCollector._program = staticmethod(quit)
        try:
            make()
        except WorkerError as error:
            print(error, flush=True)
        DistributedCollector._program = staticmethod(program)
        collector = make()
        print(*next(iter(collector)).shape)
        collector.shutdown()
"""


def test_a_collector_after_one_whose_group_was_not_formed(tmp_path):
    program = tmp_path / "quits.py"
    program.write_text(textwrap.dedent(QUITS).format(here=str(Path(__file__).parent)))
    done = run_python(program, timeout=60.0, quick_spawn=True)
    assert done.stdout.splitlines() == ["worker 1 has ended (exit code 3)", "8"], done.stderr
