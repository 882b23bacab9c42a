"""Orders to workers of a MultiAsyncCollector that collect; iterations of MultiCollectors that were left."""

import os
import signal
import time

import pytest
import torch
from collector_parts import OPTIONS, Env, make_policy, require_exact, weights_of
from marks import quick_for, slow
from test_collectors_end import interrupt
from torchrl.data import LazyTensorStorage, ReplayBuffer

from collectors import MultiAsyncCollector, MultiSyncCollector
from weight_update import LifecycleError, SyncTimeoutError
from weight_update.testing.processes import freeze, wait_until

FRAMES = 8


class Counted(Env):
    """The observation is the number of steps that a worker has made, and its process."""

    seconds = 0.0

    def __init__(self):
        super().__init__()
        self.steps = 0

    def _reset(self, tensordict=None):
        return super()._reset(tensordict).set("observation", self._observe())

    def _step(self, tensordict):
        time.sleep(self.seconds)
        self.steps += 1
        return super()._step(tensordict).set("observation", self._observe())

    def _observe(self):
        return torch.tensor([float(self.steps), float(os.getpid())])


class Slow(Counted):
    seconds = 0.02


class Slower(Counted):
    seconds = 0.06


class Slowest(Counted):
    seconds = 0.3


def collect(made, *envs, workers=1, cls=MultiAsyncCollector, **options):
    return made(
        cls,
        list(envs) * workers,
        make_policy(),
        frames_per_batch=FRAMES,
        **{"frames_timeout": 10.0, **OPTIONS, **options},
    )


def require_new(frames, batches, seen):
    """Require that no step is twice in the next batches, nor in ``seen``."""
    for _ in range(batches):
        steps = {tuple(step) for step in next(frames)["next", "observation"].flatten(0, -2).tolist()}
        assert len(steps) == FRAMES
        assert not steps & seen
        seen |= steps


ORDERS = {
    "state_dict": lambda collector: collector.state_dict(),
    "load_state_dict": lambda collector: collector.load_state_dict(collector.state_dict()),
    "reset": lambda collector: collector.reset(),
    "set_seed": lambda collector: collector.set_seed(1),
    "getattr_env": lambda collector: collector.getattr_env("batch_size"),
}


@pytest.mark.parametrize("order", quick_for(ORDERS, "state_dict", "reset"))
def test_a_worker_that_gets_an_order_while_it_collects_goes_on(order, made):
    collector, seen = collect(made, Slow), set()
    frames = iter(collector)
    for _ in range(2):
        require_new(frames, 1, seen)
        ORDERS[order](collector)
    require_new(frames, 1, seen)


@pytest.mark.parametrize("order", ["reset", "load_state_dict"])
def test_batches_that_were_not_taken_do_not_come_after_a_reset(order, made):
    collector, seen = collect(made, Counted, workers=2), set()
    frames = iter(collector)
    for _ in range(4):
        require_new(frames, 3, seen)
        time.sleep(0.1)  # both workers have finished their next batches
        ORDERS[order](collector)


def test_a_state_is_saved_between_two_batches_of_which_none_is_lost(made):
    collector, found = collect(made, Slow), []
    frames = iter(collector)
    for _ in range(4):
        found += next(frames)["next", "observation"][:, 0].tolist()
        collector.state_dict()
    assert found == list(range(1, 4 * FRAMES + 1))


def test_the_batches_after_a_restored_state_are_of_its_version(made):
    collector = collect(made, Slow, workers=2)
    frames = iter(collector)
    collector.update_policy_weights_(weights_of(1.0))
    next(frames)
    saved = collector.state_dict()
    collector.update_policy_weights_(weights_of(2.0))
    next(frames)
    collector.load_state_dict(saved)
    for _ in range(4):
        data = next(frames)
        assert set(data["policy_version"].tolist()) == {1}
        low, high = data["action"].unbind(-1)
        assert low.tolist() == high.tolist() == [1.0] * FRAMES


@pytest.mark.parametrize("cls", [MultiAsyncCollector, slow(MultiSyncCollector)])
def test_an_iteration_that_begins_anew_has_no_step_twice(cls, made):
    collector, seen = collect(made, Slow, workers=2, cls=cls), set()
    for _ in range(2):
        frames = iter(collector)
        require_new(frames, 1, seen)
        time.sleep(0.5)  # both workers have finished their next batches
        require_new(frames, 3, seen)
        time.sleep(0.5)


@pytest.mark.parametrize("cls", [slow(MultiAsyncCollector), MultiSyncCollector])
def test_an_iteration_after_ctrl_c_has_no_step_twice(cls, made):
    collector, seen = collect(made, Slower, workers=2, cls=cls), set()
    for _ in range(3):
        frames = iter(collector)
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # a batch takes twice as long, or longer
        with pytest.raises(KeyboardInterrupt):
            next(frames)
        time.sleep(0.5)  # both workers have finished their batches
    require_new(iter(collector), 3, seen)


def test_an_iteration_after_ctrl_c_between_the_first_batches_has_frames_of_every_worker(made):
    collector, seen = collect(made, Counted, Slowest, cls=MultiSyncCollector), set()
    signal.setitimer(signal.ITIMER_REAL, 0.6)  # the second worker takes twice as long
    with pytest.raises(KeyboardInterrupt):
        next(iter(collector))
    require_new(iter(collector), 2, seen)


@pytest.mark.parametrize("cls", [MultiAsyncCollector, slow(MultiSyncCollector)])
@pytest.mark.parametrize("written", [False, True])
def test_an_iteration_after_ctrl_c_while_a_worker_is_asked_has_no_step_twice(cls, written, made):
    collector, seen = collect(made, Slow, workers=2, cls=cls), set()
    pipe = collector.pipes[1]
    send = pipe._original.send

    def interrupted(order):
        pipe._original.send = send
        if written:
            send(order)
        raise KeyboardInterrupt

    pipe._original.send = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(iter(collector))
    require_new(iter(collector), 3, seen)


def test_a_state_after_ctrl_c_is_not_an_older_one(made, monkeypatch):
    collector = collect(made, Counted, workers=2)
    monkeypatch.setattr(collector, "_recv_and_check", interrupt)
    with pytest.raises(KeyboardInterrupt):
        collector.state_dict()
    monkeypatch.undo()
    collector.update_policy_weights_(weights_of(1.0))
    state = collector.state_dict()
    for worker in ("worker0", "worker1"):
        assert set(state[worker]["policy_state_dict"]["module.layers.0"].tolist()) == {1.0}
    collector.set_seed(1)


class Talkative(Counted):
    """It has an attribute that does not fit into a pipe."""

    answer = "x" * (1 << 20)


def test_an_iteration_after_ctrl_c_in_a_call_with_a_large_answer_goes_on(made, monkeypatch):
    collector = collect(made, Talkative)
    with monkeypatch.context() as patch:
        patch.setattr(collector.pipes[0], "recv", interrupt)
        with pytest.raises(KeyboardInterrupt):
            collector.getattr_env("answer")
    require_new(iter(collector), 1, set())


def test_answers_to_a_call_that_failed_are_not_those_of_the_next_one(made):
    collector = collect(made, Counted, workers=2)
    for method in ("missing", "absent"):
        with pytest.raises(AttributeError, match=f"Attribute {method}"):
            collector.map_fn(method)
    assert collector.get_distant_attr("policy_version") == [0, 0]


@pytest.fixture(autouse=True)
def ctrl_c():
    """Have SIGALRM raise KeyboardInterrupt, as SIGINT does."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGALRM, before)


def test_a_state_is_saved_while_workers_fill_a_replay_buffer(made):
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=8, shared=True)
    collector = collect(made, Slow, workers=2, replay_buffer=buffer)
    frames = iter(collector)
    for _ in range(3):
        next(frames)
        collector.state_dict()
    require_exact(buffer[:])


def free(made, **options):
    buffer = ReplayBuffer(storage=LazyTensorStorage(4000), batch_size=8, shared=True)
    collector = collect(made, Slow, workers=2, replay_buffer=buffer, **options)
    collector.start()
    wait_until(lambda: buffer.write_count > 0)
    return collector, buffer


def require_pause(collector, buffer):
    """Require that no worker collects during a pause, and that workers go on after it."""
    with collector.pause():
        count = buffer.write_count
        time.sleep(0.5)
        assert buffer.write_count == count
    wait_until(lambda: buffer.write_count > count)


def test_workers_go_on_after_an_error_in_a_pause(made):
    collector, buffer = free(made)
    with pytest.raises(KeyError), collector.pause():
        raise KeyError("the error of a user")
    count = buffer.write_count
    wait_until(lambda: buffer.write_count > count)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [MultiAsyncCollector, MultiSyncCollector])
def test_workers_go_on_after_one_did_not_pause_in_time(cls, made):
    collector, buffer = free(made, cls=cls, frames_timeout=2.0)
    stopped = collector.procs[0].pid
    with buffer._write_lock:  # otherwise the worker may have it
        freeze(stopped)
    for _ in range(2):
        with pytest.raises(SyncTimeoutError, match=r"workers \[0.* 2 s"):
            collector.pause().__enter__()
        count = buffer.write_count
        wait_until(lambda count=count: buffer.write_count > count)
    os.kill(stopped, signal.SIGCONT)
    require_pause(collector, buffer)


def test_a_pause_after_a_worker_was_lost(made):
    collector, buffer = free(made, on_worker_lost="continue")
    with buffer._write_lock:  # otherwise the worker may have it
        os.kill(collector.procs[0].pid, signal.SIGKILL)
        wait_until(lambda: collector.stats()["workers_alive"] == 1)
    require_pause(collector, buffer)
    require_pause(collector, buffer)


def test_a_pause_refuses_what_would_end_paused_workers(made):
    collector, buffer = free(made)
    with collector.pause():
        for call in (collector.state_dict, collector.reset):
            with pytest.raises(LifecycleError, match=r"workers are paused and cannot do '.*'; call it after"):
                call()
        count = buffer.write_count
    wait_until(lambda: buffer.write_count > count)


def test_a_collector_that_is_shut_down_in_a_pause(made):
    collector, _ = free(made)
    processes = [process._original for process in collector.procs]
    with collector.pause():
        collector.shutdown()
    assert [process.exitcode for process in processes] == [0, 0]
