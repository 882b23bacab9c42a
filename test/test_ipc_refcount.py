"""Memory lent to other processes is kept until the last of them has let go."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from weight_update.transports.shared_memory.ipc_refcount import Loan

fork = multiprocessing.get_context("fork")


def borrowed(ours: socket.socket) -> int:
    """Body of a process: borrow, say so, and wait for one byte."""
    _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
    ours.send(b"!")
    ours.recv(1)
    return fd


def freed(memory: weakref.ref[torch.Tensor]) -> bool:
    """Whether it is gone, once the threads that keep memory had their time."""
    for thread in threading.enumerate():
        if thread.name == "weight_update-loan":
            thread.join(10.0)
    return memory() is None


def let_go(pid: int, ours: socket.socket) -> None:
    del pid
    ours.send(b".")


def kill(pid: int, ours: socket.socket) -> None:
    del ours
    os.kill(pid, signal.SIGKILL)


def test_memory_that_nobody_borrowed_is_free_at_once() -> None:
    memory, loan = torch.empty(8), Loan()
    ref = weakref.ref(memory)
    loan.end(memory)
    loan.end(memory)
    del memory
    assert ref() is None


@pytest.mark.parametrize("end", [let_go, kill])
@pytest.mark.parametrize("borrowers", [1, 3])
def test_memory_is_kept_as_long_as_a_process_has_it(
    borrowers: int, end: Callable[[int, socket.socket], None]
) -> None:
    memory, loan = torch.empty(8), Loan()
    ref = weakref.ref(memory)
    pairs = [socket.socketpair() for _ in range(borrowers)]
    there = [fork.Process(target=borrowed, args=(theirs,)) for _, theirs in pairs]
    for process, (ours, theirs) in zip(there, pairs, strict=True):
        process.start()
        theirs.close()
        socket.send_fds(ours, [b"?"], [loan.fd])
        assert ours.recv(1) == b"!"
    loan.end(memory)
    del memory
    for process, (ours, _) in zip(there, pairs, strict=True):
        assert ref() is not None
        end(process.pid, ours)
        process.join(10.0)
        ours.close()
    assert freed(ref)


def test_a_child_that_was_not_given_it_has_not_borrowed_it() -> None:
    memory, loan = torch.empty(8), Loan()
    ref = weakref.ref(memory)
    ours, theirs = socket.socketpair()
    child = fork.Process(target=theirs.recv, args=(1,))
    child.start()
    loan.end(memory)
    del memory
    assert freed(ref)
    ours.send(b".")
    child.join(10.0)
    ours.close()
    theirs.close()
