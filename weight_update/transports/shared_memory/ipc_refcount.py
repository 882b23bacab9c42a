"""Reference count of memory that other processes opened: a pipe whose writing end each of them holds."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import select
import termios
import weakref

from weight_update.threads import start_thread


class IpcReferences:
    """References of other processes to some memory, counted by the kernel.

    The references are copies of the writing end of a pipe. A process that opens the memory gets one, and
    closes it when it is done; the kernel closes it for a process that dies. The reading end hangs up with the
    last one.
    """

    def __init__(self) -> None:
        # `fd` is the writing end, to be sent to other processes; -1 after close().
        self._reading, self.fd = os.pipe2(os.O_CLOEXEC)
        _made_here.add(self)

    def close(self, memory: object) -> None:
        """Give out no more references; keep ``memory`` until the last one is closed. Does not wait."""
        if self.fd < 0:
            return
        os.write(self.fd, b".")  # shows the release to holders of a reference; never read
        os.close(self.fd)
        self.fd = -1
        if self._all_closed(0):
            return
        with contextlib.suppress(RuntimeError):  # the interpreter exits, and the memory goes with it
            start_thread("weight_update-ipc-memory", self._keep, memory)

    def _keep(self, memory: object) -> None:
        self._all_closed(None)
        del memory

    def _all_closed(self, timeout: float | None) -> bool:
        """Return whether all references were closed within ``timeout`` milliseconds; None waits for it."""
        poller = select.poll()
        poller.register(self._reading, 0)  # POLLHUP is always reported
        if not poller.poll(timeout):
            return False
        os.close(self._reading)
        return True


def owner_released(fd: int) -> bool:
    """Return whether the owner of the writing end ``fd`` has called :meth:`IpcReferences.close`."""
    unread = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, unread)
    return unread[0] > 0


_made_here: weakref.WeakSet[IpcReferences] = weakref.WeakSet()


def _close_inherited() -> None:
    for references in list(_made_here):
        if references.fd >= 0:
            os.close(references.fd)
            references.fd = -1


os.register_at_fork(after_in_child=_close_inherited)
