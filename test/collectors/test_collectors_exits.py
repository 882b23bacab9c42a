"""Worker processes that are ending: their files are closed, but nobody has reaped them."""

import contextlib
import math
import multiprocessing
import queue
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from collectors import exits, frames
from collectors.exits import StartedPipe, await_any, describe_exit
from collectors.frames import BatchQueue, ControlPipe
from collectors.nodes import Nodes, _Process
from weight_update import SyncTimeoutError, WorkerError


class Process:
    """A stand-in for a worker process, which lives."""

    ident, exitcode = 1, None

    def __init__(self):
        self.reader, self.writer = multiprocessing.Pipe(duplex=False)
        self.sentinel = self.reader.fileno()

    def is_alive(self):
        return self.exitcode is None

    def join(self, timeout=None):
        time.sleep(timeout)


class Dying(Process):
    """A stand-in for a killed process, whose sentinel is ready and which ``join()`` has yet to reap."""

    def __init__(self):
        super().__init__()
        self.writer.close()

    def join(self, timeout=None):
        self.exitcode = -9


class GoneBatches:
    """A queue whose batch is in the memory of a worker that has ended."""

    def get(self, timeout):
        raise ConnectionRefusedError(111, "Connection refused")

    def close(self):
        pass


class InterruptedBatches:
    """A queue with one batch, of worker 0; a Ctrl-C comes when the batch does."""

    def __init__(self):
        self.items = queue.SimpleQueue()
        self.items.put((("batch", 0), 1))

    def get(self, timeout):
        item = self.items.get(timeout=timeout)
        signal.raise_signal(signal.SIGINT)  # its handler runs in the main thread, once that has the batch
        return item

    def close(self):
        pass


@contextlib.contextmanager
def queue_of(*processes, batches=None, may_lose=True, frames_timeout=math.inf, in_rounds=False):
    options = {"frames_timeout": frames_timeout, "may_lose": may_lose}
    pipes = [multiprocessing.Pipe()[0] for _ in processes]
    made = BatchQueue(batches or GoneBatches(), processes, pipes, in_rounds=in_rounds, **options)
    with contextlib.closing(made):
        yield made


def test_a_batch_that_arrives_with_ctrl_c_is_not_lost():
    """The next iteration would wait for it: its worker was asked for a batch, and has delivered it."""
    with queue_of(Process(), batches=InterruptedBatches(), may_lose=False, frames_timeout=3.0) as batches:
        batches.ask(0)
        with pytest.raises(KeyboardInterrupt):
            batches.get(1.0)
        batches.settle(0)
        assert batches.kept == 1
        assert batches.get(0.0) == (("batch", 0), 1)


def test_a_batch_that_is_read_again_after_ctrl_c_counts_once(monkeypatch):
    """Otherwise the next time limit would apply to another worker."""
    items = multiprocessing.Queue()
    options = {"may_lose": False, "frames_timeout": 0.5, "in_rounds": True}
    with queue_of(Process(), Process(), batches=items, **options) as batches:
        for worker in range(2):
            batches.ask(worker)
            items.put((("batch", worker), 0))
        batches.get(1.0)
        with monkeypatch.context() as patch:
            patch.setattr(batches._reader, "remove", lambda: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                batches.get(1.0)
        batches.settle(1)
        batches.ask(1)
        with pytest.raises(SyncTimeoutError, match=r"no batch of workers \[1\]"):
            batches.settle(1)


def test_a_worker_that_was_late_gets_as_much_time_again():
    with queue_of(Process(), batches=multiprocessing.Queue(), may_lose=False, frames_timeout=0.3) as batches:
        batches.ask(0)
        for _ in range(2):
            start = time.monotonic()
            with pytest.raises(SyncTimeoutError, match=r"no batch of workers \[0\]"):
                batches.settle(0)
            assert time.monotonic() - start > 0.25


def test_an_unreadable_batch_is_that_of_a_worker_that_is_ending():
    with queue_of(Process(), Dying()) as batches:
        with pytest.raises(queue.Empty):
            batches.get(1.0)
        assert set(batches.lost) == {1}


def test_the_error_of_an_unreadable_batch_names_the_worker_that_is_ending():
    with (
        queue_of(Process(), Dying(), may_lose=False) as batches,
        pytest.raises(WorkerError, match="worker 1 has ended"),
    ):
        batches.get(1.0)


def test_workers_that_are_ending_are_lost():
    with queue_of(Process(), Dying(), Dying()) as batches:
        assert batches.lost_all([1, 2])
        assert not batches.lost_all([0, 1])


def test_the_error_of_a_broken_pipe_names_the_worker_that_is_ending():
    with queue_of(Process(), Dying(), may_lose=False) as batches:
        pipe = ControlPipe(Dying().reader, batches, 1)
        with pytest.raises(WorkerError, match="worker 1 has ended"):
            pipe.recv()


def test_a_worker_that_never_answers_is_not_waited_for_without_end():
    ours, theirs = multiprocessing.Pipe()
    with queue_of(Process(), frames_timeout=0.5, may_lose=False) as batches:
        pipe = ControlPipe(ours, batches, 0)
        pipe.send((None, "state_dict"))  # the call that waits for the answer is interrupted
        with pytest.raises(SyncTimeoutError, match=r"worker 0 did not answer a call in 0\.5 s"):
            pipe.send((None, "state_dict"))
    assert theirs.recv() == (None, "state_dict")


def test_the_answer_to_a_call_is_not_waited_for_without_end():
    ours, theirs = multiprocessing.Pipe()
    with queue_of(Process(), frames_timeout=0.5, may_lose=False) as batches:
        pipe = ControlPipe(ours, batches, 0)
        for _ in range(2):  # after an error, it is waited for again
            start = time.monotonic()
            with pytest.raises(SyncTimeoutError, match=r"worker 0 did not answer a call in 0\.5 s"):
                any(pipe.poll(0.1) for _ in range(20))
            assert time.monotonic() - start > 0.5
        theirs.send("answer")
        assert pipe.poll()
        assert pipe.recv() == "answer"


def test_two_threads_find_the_error_that_ended_a_worker(monkeypatch):
    """One iterates, the other updates the policy."""
    left = ["Traceback"]

    def read(pipe):
        found = left.pop() if left else ""
        time.sleep(0.3 if found else 0.0)
        return found

    monkeypatch.setattr(frames, "read_error", read)
    with queue_of(Process(), Dying()) as batches, ThreadPoolExecutor() as pool:
        found = list(pool.map(batches.gone, [1, 1]))
    assert found == ["worker 1 has ended (exit code -9):\nTraceback"] * 2


@pytest.mark.parametrize(
    ("made", "error", "text"),
    [
        (Process, SyncTimeoutError, r"worker 0 did not start in 0\.3 s \(frames_timeout= raises the limit\)"),
        (Dying, WorkerError, r"worker 0 has ended \(exit code -9, SIGKILL"),
    ],
)
def test_a_worker_that_does_not_start_is_not_waited_for_without_end(made, error, text):
    ours, theirs = multiprocessing.Pipe()  # a forked worker may have the other end of another one
    process = made()
    process.join(0.0)
    pipe = StartedPipe(ours, 0, [process], 0.3)
    start = time.monotonic()
    with pytest.raises(error, match=text):
        pipe.recv()
    assert time.monotonic() - start < 5
    theirs.send("an error")
    assert pipe.recv() == "an error"


def test_workers_that_are_ending_are_asked_once_to_end():
    nodes, asked = Nodes(), []
    nodes._nodes.append(_Process(Dying(), multiprocessing.Pipe()[0]))
    nodes.end(lambda: asked.append(1), 10.0)
    assert asked == [1]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_killed_process_is_not_alive_once_its_end_was_awaited(method):
    ctx = multiprocessing.get_context(method)
    for _ in range(5 if method == "fork" else 1):
        processes = [ctx.Process(target=time.sleep, args=(60.0,)) for _ in range(2)]
        for process in processes:
            process.start()
        processes[1].kill()
        await_any(processes, 10.0)
        assert [process.is_alive() for process in processes] == [True, False]
        processes[0].kill()
        processes[0].join()


def test_a_long_error_is_shortened_to_what_a_pipe_keeps(monkeypatch):
    def fail(pipe_child, worker_idx):
        pipe_child.send("an answer")
        raise RuntimeError("x" * 1_000_000 + " at the end")

    monkeypatch.setattr(exits, "main_of_worker", fail)
    ours, theirs = multiprocessing.Pipe()
    with pytest.raises(RuntimeError):
        exits.run_worker(pipe_child=theirs, worker_idx=0)
    error = exits.read_error(ours)
    assert error.startswith("Traceback")
    assert error.endswith("x at the end")
    assert len(error) < 21_000


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "has ended (exit code 0)"),
        (1, "has ended (exit code 1, probably an exception; see its output)"),
        (3, "has ended (exit code 3)"),
        (-signal.SIGSEGV, "has ended (exit code -11, SIGSEGV)"),
        (-signal.SIGKILL, "has ended (exit code -9, SIGKILL, often the kernel when memory ran out)"),
        (-(signal.SIGRTMIN + 1), f"has ended (exit code {-(signal.SIGRTMIN + 1)})"),
    ],
)
def test_an_exit_is_described_by_its_signal(code, text):
    assert describe_exit(SimpleNamespace(exitcode=code)) == text
