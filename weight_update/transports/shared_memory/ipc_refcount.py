"""Memory lent to other processes, and when all of them have let go of it."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import select
import termios
import threading
import weakref

__all__ = ["Loan", "loan_ended"]


class Loan:
    """Says when no other process holds some memory any more, however the last of them ended.

    It is a pipe. Whoever borrows the memory gets the writing end, and closes it when done; the kernel closes
    it for a process that dies. When nobody is left, the reading end hangs up.

    Attributes:
        fd: the writing end, to be handed out; -1 after :meth:`end`.
    """

    def __init__(self) -> None:
        self._reading, self.fd = os.pipe2(os.O_CLOEXEC)
        _begun_here.add(self)

    def end(self, memory: object) -> None:
        """Lend to nobody any more; ``memory`` is kept until nobody holds it. Does not wait."""
        if self.fd < 0:
            return
        os.write(self.fd, b".")  # which tells borrowers; nobody reads it
        os.close(self.fd)
        self.fd = -1
        if self._returned(0):
            return
        keeper = threading.Thread(target=self._keep, args=(memory,), name="weight_update-loan", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter ends, and the memory with it
            keeper.start()

    def _keep(self, memory: object) -> None:
        self._returned(None)
        del memory

    def _returned(self, timeout: float | None) -> bool:
        """Whether nobody holds it after so many seconds; None waits for that."""
        poller = select.poll()
        poller.register(self._reading, 0)  # hanging up is always told
        if not poller.poll(timeout):
            return False
        os.close(self._reading)
        return True

    def forget(self) -> None:
        """In a forked child, which borrows nothing: close what was inherited."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def loan_ended(fd: int) -> bool:
    """Return whether the lender of the writing end ``fd`` has called :meth:`Loan.end`."""
    unread = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, unread)
    return unread[0] > 0


_begun_here: weakref.WeakSet[Loan] = weakref.WeakSet()


def _forget_all() -> None:
    for loan in list(_begun_here):
        loan.forget()


os.register_at_fork(after_in_child=_forget_all)
