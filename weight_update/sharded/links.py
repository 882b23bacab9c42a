"""The connections between the ranks of a sharded trainer: messages, errors and bytes."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import weight_update.errors as known_errors
from weight_update.errors import (
    LifecycleError,
    SchemaMismatchError,
    SyncFailedError,
    SyncTimeoutError,
    WeightSyncError,
    WorkerError,
    kept_error,
)
from weight_update.text import brief
from weight_update.threads import start_thread
from weight_update.transports.distributed.store import PrefixStore, ProcessGroupGloo, disown, own

Message = dict[str, Any]
"""A message between ranks; it travels as JSON."""

_FRAME = 4096
_LENGTH_BYTES = 8
_FIRST, _REST, _DATA = 0, 1, 2  # tags; data takes all from there
_MOMENT = 0.001
_REASON_SECONDS = 2.0
_numbers: dict[tuple[int, ...], Iterator[int]] = {}


class RankLinks:
    """This rank's connections: to all other ranks on the leader, to the leader on all others.

    Methods name a rank by its place in ``members``; the place of the leader is 0. The leader numbers its
    messages, and each says to which of them it has reports, so that the others forget those before.

    Args:
        members: numbers, in the default process group, of the ranks that take part; the first leads.
        patience: seconds that another rank may be silent.
        rendezvous_timeout: seconds to wait here for all ranks.

    Attributes:
        broken: error that every later call raises, once a rank was lost or this was closed.
        tags: new tags for data, on the leader.
        patience: seconds that another rank may be silent.
    """

    def __init__(self, members: Sequence[int], patience: float, rendezvous_timeout: float) -> None:
        me = dist.get_rank()
        if me not in members:
            raise LifecycleError(f"rank {me} is not in the group of the trainer {list(members)}")
        self.members, self.patience = list(members), patience
        self.me, self.size = self.members.index(me), len(self.members)
        self.broken: Exception | None = None
        self._gone: set[int] = set()
        self._told = 0  # number of the leader's last message; a report answers one of them
        self._heard = 0  # on the leader, number of its last message to which it has reports
        # Those that the leader may not have, with their numbers; there may be several to one message.
        self._reports: list[tuple[int, Any]] = []
        # Frames of the message from each rank, by tag: what is received there, and the transfer.
        self._coming: dict[int, dict[int, tuple[torch.Tensor, Any]]] = {}
        self._pulls: dict[int, Any] = {}  # what the leader receives, by the place of the sender
        self._store: Any = None
        self.tags = itertools.count(_DATA)
        self._group: Any = None if self.size == 1 else self._rendezvous(rendezvous_timeout)

    @property
    def leads(self) -> bool:
        """Whether this rank talks to workers."""
        return self.me == 0

    @property
    def others(self) -> range:
        """Positions in ``members`` of all ranks but the leader."""
        return range(1, self.size)

    def name(self, place: int) -> str:
        """Return the name of a rank for messages."""
        return f"rank {self.members[place]} of the trainer"

    def close(self) -> None:
        """Close the connections: ranks that wait for this one get an error."""
        self.broken = self.broken or LifecycleError("this scheme was shut down")
        group, self._group = self._group, None
        self._reports.clear()
        disown(group)

    def finish(self, place: int, work: Any, deadline: float | None = None) -> None:
        """Wait until a transfer that was begun is complete; without a deadline, wait ``patience`` seconds."""
        left = self.patience if deadline is None else max(deadline - time.monotonic(), _MOMENT)
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise self._lost(place, error) from None

    # -- on the leader -----------------------------------------------------------------------------

    def tell(self, message: Message) -> None:
        """Send a message to all others, on the leader."""
        self.tell_each(dict.fromkeys(self.others, message))

    def tell_each(self, messages: Mapping[int, Message]) -> None:
        """Send a message to each of the others, on the leader."""
        self._told += 1
        problems: list[Exception] = []
        sent: list[tuple[int, Any]] = []
        for to, message in messages.items():
            if to not in self._gone:
                try:
                    numbered = {**message, "number": self._told, "heard": self._heard}
                    sent += [(to, work) for work in self._send(to, numbered)]
                except WeightSyncError as error:
                    problems.append(error)
        deadline = time.monotonic() + self.patience
        for to, work in sent:
            if to not in self._gone:
                try:
                    self.finish(to, work, deadline)
                except WeightSyncError as error:
                    problems.append(error)
        if problems:
            raise kept_error(problems[0])

    def hear(self) -> list[Message]:
        """Return the report of each of the others, on the leader, once it has the bytes that they pushed.

        Raises as :meth:`Ranks.step`. A rank whose report is an error pushes nothing.
        """
        deadline = time.monotonic() + self.patience
        pulls, self._pulls = self._pulls, {}
        heard = [self._hear(place, deadline) for place in self.others]
        self._heard = self._told
        for place, message in zip(self.others, heard, strict=True):
            if place in pulls and "error" not in message:
                self.finish(place, pulls[place])
        for place, message in zip(self.others, heard, strict=True):
            if "error" in message:
                raise error_from_wire(message["error"], self.name(place), foreign=True)
        return heard

    def _hear(self, place: int, deadline: float) -> Message:
        while True:
            message = self._receive(place, deadline)
            if message["to"] == self._told:  # older reports are to messages that the leader failed after
                return message

    def pull(self, place: int, into: torch.Tensor, tag: int) -> None:
        """Begin to receive bytes, on the leader; they are complete after the next :meth:`hear`."""
        self._pulls[place] = self._begin_to_receive(place, into, tag)

    def drain(self) -> None:
        """Complete what was begun by :meth:`pull`, also after an error: gloo cannot take it back."""
        if self._pulls and self.broken is None:
            with contextlib.suppress(WeightSyncError):  # the error before is raised
                self.hear()
        self._pulls = {}

    def cut(self) -> None:
        """Close the connections to ranks that are left, on the leader; their calls raise the reason.

        Gloo's ``abort()`` closes none of them. A wait of gloo that reaches its timeout closes all.
        """
        left = [place for place in self.others if place not in self._gone]
        if self._group is not None and left:
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            with contextlib.suppress(RuntimeError):
                self._group.recv([nothing], left[0], next(self.tags)).wait(timedelta(seconds=_MOMENT))

    # -- on the other ranks ------------------------------------------------------------------------

    def listen(self) -> Message:
        """Return the next message of the leader, on the other ranks."""
        message = self._receive(0)
        self._told = message["number"]
        self._reports = [(to, work) for to, work in self._reports if to >= message["heard"]]
        return message

    def report(self, message: Message) -> None:
        """Answer the leader, without waiting: it may never receive the answer."""
        sent = self._send(0, {**message, "to": self._told})
        self._reports += [(self._told, work) for work in sent]

    def push(self, data: torch.Tensor, tag: int, to: int = 0) -> Any:
        """Begin to send bytes; do not change them before :meth:`finish`."""
        return self._begin(to, lambda: self._group.send([data], to, tag))

    # -- on all ranks ------------------------------------------------------------------------------

    def _send(self, to: int, message: Message) -> list[Any]:
        body = json.dumps(message, separators=(",", ":")).encode()
        front = len(body).to_bytes(_LENGTH_BYTES, "little") + body[: _FRAME - _LENGTH_BYTES]
        rest = body[_FRAME - _LENGTH_BYTES :]
        frames = [(_FIRST, front.ljust(_FRAME, b"\0")), *([(_REST, rest)] if rest else [])]
        return [
            self.push(torch.frombuffer(bytearray(data), dtype=torch.uint8), tag, to) for tag, data in frames
        ]

    def _receive(self, place: int, deadline: float | None = None) -> Message:
        front = self._take(place, _FRAME, _FIRST, deadline)
        length = int.from_bytes(front[:_LENGTH_BYTES], "little")
        body = front[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if length > len(body):
            body += self._take(place, length - len(body), _REST, deadline)
        message: Message = json.loads(body)
        del self._coming[place]
        return message

    def _take(self, place: int, nbytes: int, tag: int, deadline: float | None) -> bytes:
        coming = self._coming.setdefault(place, {})
        if tag not in coming:
            into = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            coming[tag] = into, self._begin_to_receive(place, into, tag)
        into, work = coming[tag]
        if not work.is_completed():  # else a signal handler raised at the end of the wait for it
            self.finish(place, work, deadline)
        return into.numpy().tobytes()

    def _begin_to_receive(self, place: int, into: torch.Tensor, tag: int) -> Any:
        return self._begin(place, lambda: self._group.recv([into], place, tag))

    def _begin(self, place: int, begin: Callable[[], Any]) -> Any:
        try:
            return begin()
        except (AttributeError, RuntimeError) as error:
            if self._group is not None:
                raise self._lost(place, error) from None
        assert self.broken is not None, "it was closed, perhaps by another thread"
        raise kept_error(self.broken)

    def _lost(self, place: int, error: Exception) -> Exception:
        """Mark a rank as lost, which is never waited for again: its next message could belong to any call."""
        text, rank = brief(error).partition(". ")[0], self.name(place)  # without gloo's advice
        lost: Exception
        if not self.leads and (why := self._last_words()) is not None:
            lost = error_from_wire(why)
        elif "imed out" in text or "timing out" in text:
            lost = SyncTimeoutError(
                f"{rank} took no part for {self.patience:g} s; every rank makes the same calls of the scheme "
                "(or raise timeout=)"
            )
        else:
            lost = SyncFailedError(f"{rank} is gone ({text})", {})
        if self.leads and self.broken is None:  # for the ranks that gloo cuts off as well when one is late
            with contextlib.suppress(RuntimeError):  # the store is gone too
                self._store.set("why", json.dumps(error_to_wire(lost)))
        self.broken = self.broken or kept_error(lost)
        self._gone.add(place)
        return lost

    def _last_words(self) -> Message | None:
        """Return the reason that the leader left in the store; None without one.

        PyTorch's client waits without a limit for a store whose process has stopped, so a thread asks. If no
        thread can be started, nobody asks.
        """
        said: list[Message] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # the store is gone too, or has no reason
                self._store.wait(["why"], timedelta(seconds=_REASON_SECONDS))
                said.append(json.loads(self._store.get("why")))

        with contextlib.suppress(RuntimeError):
            start_thread("weight_update-why", ask, in_order=True).join(2 * _REASON_SECONDS)
        return said[0] if said else None

    def _rendezvous(self, timeout: float) -> Any:
        number = next(_numbers.setdefault(tuple(self.members), itertools.count()))
        name = f"weight_update/ranks/{'-'.join(map(str, self.members))}/{number}"
        self._store = PrefixStore(name, dist.distributed_c10d._get_default_store())
        try:
            group = ProcessGroupGloo(self._store, self.me, self.size, timedelta(seconds=timeout))
        except RuntimeError as error:
            raise SyncTimeoutError(
                f"the ranks {self.members} of the trainer did not all call init_on_sender() within "
                f"{timeout:g} s; where not all ranks train, give GatherShards(group=...) "
                f"({brief(error)})"
            ) from None
        return own(group)


def error_to_wire(error: BaseException) -> Message:
    """Return an error in a form that JSON can hold."""
    wire: Message = {"type": type(error).__name__, "text": str(error)}
    if isinstance(error, SchemaMismatchError):
        wire = {**wire, "text": str(error).partition("\n")[0], "problems": error.problems}
    if isinstance(error, SyncFailedError):
        wire["failures"] = failures_to_wire(error.failures)
    return wire


def error_from_wire(wire: Message, who: str | None = None, *, foreign: bool = False) -> Exception:
    """Return the error that another process raised; errors of this library keep their type.

    ``who`` names the process; None stands for a worker. With ``foreign`` the message names it in any case.
    """
    text, known = wire["text"], vars(known_errors).get(wire["type"])
    if foreign and known is not None:
        text = f"{who}: {text}"
    if "problems" in wire:
        return SchemaMismatchError(text, tuple(wire["problems"]))
    if "failures" in wire:
        return SyncFailedError(text, failures_from_wire(wire["failures"]))
    if isinstance(known, type) and issubclass(known, WeightSyncError):
        found: Exception = known(text)
        return found
    if who is None:
        return WorkerError(f"{wire['type']}: {text}")
    return SyncFailedError(f"{who} failed: {wire['type']}: {text}", {})


def failures_to_wire(failures: Mapping[int, Exception]) -> Message:
    """Return the errors of workers, by index, in a form that JSON can hold."""
    return {str(idx): error_to_wire(error) for idx, error in failures.items()}


def failures_from_wire(wire: Message) -> dict[int, Exception]:
    """Return the errors of workers, by index."""
    return {int(idx): error_from_wire(error) for idx, error in wire.items()}
