"""Listeners that take one join request after the other and give each worker's connection to its link."""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from weight_update.errors import FormatError, JoinRefusedError, undo_on_error
from weight_update.transports.listener import ListenerThread
from weight_update.transports.reconnecting import ReconnectingLink
from weight_update.wire.frames import Kind, WeightChunk

_REFUSAL_SECONDS = 5.0

_L = TypeVar("_L", bound=ReconnectingLink[Any])


class JoinListener(ListenerThread, Generic[_L]):
    """A thread that admits workers at any time, until it is closed, and gives each connection to its link.

    A subclass implements :meth:`accept` and :meth:`wake`. A scheme makes its listener in
    :meth:`~weight_update.WeightSyncScheme.open_sender`. No error stops the thread; each error is recorded as
    a refusal.

    Args:
        token: secret that workers must know.
        links: the sender's end for each worker index.
        late_joiners: returns the link for a worker index without one, or raises
            :class:`~weight_update.JoinRefusedError`; see
            :meth:`~weight_update.WeightSyncScheme.late_joiner_links`.

    Attributes:
        refusals: reasons of the last refused join requests.
    """

    def __init__(self, token: str, links: Mapping[int, _L], late_joiners: Callable[[int], _L]) -> None:
        super().__init__(logging.getLogger(type(self).__module__))
        self._token, self._links, self._late_joiners = token, links, late_joiners

    @abstractmethod
    def accept(self) -> tuple[Any, WeightChunk | None] | None:
        """Wait for the next worker; return its connection and the first chunk received from it.

        Workers join one after the other, so the wait for the first chunk needs a limit. Return None to be
        called again, for example when no worker came. Return soon after :meth:`wake`.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make :meth:`accept` return, because this listener was closed."""

    def _step(self) -> None:
        """Admit one worker, if one comes; keep no reference to its connection."""
        found = self.accept()
        if found is not None:
            self._admit(*found)

    def _admit(self, connection: Any, hello: WeightChunk | None) -> None:
        """Give the connection of a worker to its link, or answer why the worker is refused, and raise."""
        refuse = answering_refusals(lambda answer: connection.send(answer, _REFUSAL_SECONDS))
        with undo_on_error(connection.close), refuse:
            if hello is None or hello.kind is not Kind.HELLO:
                raise FormatError("the first chunk of a connection is not a HELLO, or did not come in time")
            if not hello.shows(self._token):
                raise JoinRefusedError("wrong token: both ends need the same one")
            if self._closed.is_set():
                raise JoinRefusedError("the sender was closed")
            link = link_for(hello, self._links, self._late_joiners)
        link.take_over(connection, hello)


def link_for(hello: WeightChunk, links: Mapping[int, _L], late_joiners: Callable[[int], _L]) -> _L:
    """Return the link of the worker that sent ``hello``; JoinRefusedError if the worker is not admitted."""
    worker: int = hello.header["worker"]
    link = links.get(worker) or late_joiners(worker)
    link.screen(hello)
    return link


@contextlib.contextmanager
def answering_refusals(send: Callable[[WeightChunk], object]) -> Iterator[None]:
    """Return a context manager that sends a worker the reason if its body raises JoinRefusedError."""
    try:
        yield
    except JoinRefusedError as error:
        with contextlib.suppress(OSError, EOFError):  # the worker may be gone
            send(WeightChunk(Kind.REFUSED, {"reason": str(error), "problems": list(error.problems)}))
        raise
