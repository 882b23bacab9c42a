"""The lock that the workers of a collector share."""

import multiprocessing
import os
import signal
import threading
import time

import pytest
from marks import slow

from collectors.locks import ProcessLock

SPAWN = multiprocessing.get_context("spawn")
FORK = multiprocessing.get_context("fork")


def count(lock, total, rounds):
    for _ in range(rounds):
        with lock:
            total.value += 1  # not atomic


def hold_and_end(lock):
    lock.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


def hold_one_and_wait_for_the_other(mine, other, both_hold):
    """Hold a lock in one thread while another thread waits for the other lock."""

    had = []

    def wait_for_other():
        with other:
            had.append(True)

    with mine:
        both_hold.wait()
        waiting = threading.Thread(target=wait_for_other)
        waiting.start()
        waiting.join(0.5)
    waiting.join()
    assert had == [True]


def run(ctx, *targets, **options):
    processes = [ctx.Process(target=target, args=args) for target, *args in targets]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


@pytest.mark.parametrize("ctx", [slow(SPAWN), FORK], ids=["spawn", "fork"])
def test_one_process_at_a_time_holds_it(ctx):
    lock, total = ProcessLock(), ctx.Value("i", 0, lock=False)
    assert run(ctx, *[(count, lock, total, 2000)] * 2) == [0, 0]
    assert total.value == 4000


def test_one_thread_at_a_time_holds_it():
    lock = ProcessLock()
    lock.acquire()
    waiting = threading.Thread(target=lock.acquire)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    lock.release()
    waiting.join(10)
    assert not waiting.is_alive()


def test_it_is_free_when_its_holder_was_killed():
    lock = ProcessLock()
    assert run(FORK, (hold_and_end, lock)) == [-signal.SIGKILL]
    with lock:
        pass


def test_threads_of_two_processes_that_wait_for_each_other_are_no_deadlock():
    """The kernel, which sees only processes, refuses one of the waits."""
    first, second, both_hold = ProcessLock(), ProcessLock(), FORK.Barrier(2)
    ends = (
        (hold_one_and_wait_for_the_other, first, second, both_hold),
        (hold_one_and_wait_for_the_other, second, first, both_hold),
    )
    assert run(FORK, *ends) == [0, 0]


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent():
    """In the child, nobody would release the lock for that thread."""
    lock, held = ProcessLock(), threading.Event()

    def hold():
        with lock:
            held.set()
            time.sleep(0.5)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = FORK.Process(target=count, args=(lock, FORK.Value("i", 0, lock=False), 1))
    child.start()
    holder.join()
    child.join(20)
    if child.exitcode is None:
        child.kill()
    assert child.exitcode == 0


def test_a_lock_that_is_gone_closes_its_file():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        ProcessLock()
    assert len(os.listdir("/proc/self/fd")) == before
