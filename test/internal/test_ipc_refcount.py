"""Memory shared with other processes is kept until the last of them has closed its reference."""

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

from weight_update.transports.shared_memory.ipc_refcount import IpcReferences

fork = multiprocessing.get_context("fork")


def hold_reference(ours: socket.socket) -> int:
    """Run a process that takes a reference, confirms it, and waits for one byte."""
    _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
    ours.send(b"!")
    ours.recv(1)
    return fd


def freed(memory: weakref.ref[torch.Tensor]) -> bool:
    """Return whether the memory is freed, after waiting for the threads that keep it."""
    for thread in threading.enumerate():
        if thread.name == "weight_update-ipc-memory":
            thread.join(10.0)
    return memory() is None


def close_descriptor(pid: int, ours: socket.socket) -> None:
    del pid
    ours.send(b".")


def kill(pid: int, ours: socket.socket) -> None:
    del ours
    os.kill(pid, signal.SIGKILL)


def test_memory_without_references_is_freed_at_once() -> None:
    memory, references = torch.empty(8), IpcReferences()
    ref = weakref.ref(memory)
    references.close(memory)
    references.close(memory)
    del memory
    assert ref() is None


@pytest.mark.parametrize("end", [close_descriptor, kill])
@pytest.mark.parametrize("holders", [1, 3])
def test_memory_is_kept_while_a_process_references_it(
    holders: int, end: Callable[[int, socket.socket], None]
) -> None:
    memory, references = torch.empty(8), IpcReferences()
    ref = weakref.ref(memory)
    pairs = [socket.socketpair() for _ in range(holders)]
    there = [fork.Process(target=hold_reference, args=(theirs,)) for _, theirs in pairs]
    for process, (ours, theirs) in zip(there, pairs, strict=True):
        process.start()
        theirs.close()
        socket.send_fds(ours, [b"?"], [references.fd])
        assert ours.recv(1) == b"!"
    references.close(memory)
    del memory
    for process, (ours, _) in zip(there, pairs, strict=True):
        assert ref() is not None
        end(process.pid, ours)
        process.join(10.0)
        ours.close()
    assert freed(ref)


def test_a_forked_child_holds_no_reference() -> None:
    memory, references = torch.empty(8), IpcReferences()
    ref = weakref.ref(memory)
    ours, theirs = socket.socketpair()
    child = fork.Process(target=theirs.recv, args=(1,))
    child.start()
    references.close(memory)
    del memory
    assert freed(ref)
    ours.send(b".")
    child.join(10.0)
    ours.close()
    theirs.close()
