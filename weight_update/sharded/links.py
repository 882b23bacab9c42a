"""What the ranks of a sharded trainer tell each other: messages, and bytes."""

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

from weight_update.errors import LifecycleError, SyncFailedError, SyncTimeoutError, WeightSyncError
from weight_update.sharded.errors import error_from_wire, error_to_wire
from weight_update.transports.distributed.store import PrefixStore, ProcessGroupGloo, disown, own

__all__ = ["Message", "RankLinks"]

Message = dict[str, Any]
"""What ranks tell each other; it goes as JSON."""

_FRAME = 4096
_LENGTH_BYTES = 8
_FIRST, _REST, _DATA = 0, 1, 2  # tags; data takes all from there
_MOMENT = 0.001
_LAST_WORDS = timedelta(seconds=2)
_numbers: dict[tuple[int, ...], Iterator[int]] = {}


class RankLinks:
    """This rank's connection to the others: to all of them on the leader, to the leader on all others.

    Args:
        members: the ranks that take part, by their number in the default process group; the first leads.
        timeout: seconds that a rank may be late.
        meeting: seconds to wait for all of them here.

    Attributes:
        broken: why nothing works any more: a rank was lost, or this was closed.
        patience: others: seconds that the leader may be silent.

    Raises:
        LifecycleError: this rank is not one of them.
        SyncTimeoutError: they did not all come.
    """

    def __init__(self, members: Sequence[int], timeout: float, meeting: float) -> None:
        me = dist.get_rank()
        if me not in members:
            raise LifecycleError(f"rank {me} is not in the group of the trainer {list(members)}")
        self.members, self.timeout = list(members), timeout
        self.me, self.size = self.members.index(me), len(self.members)
        self.broken: Exception | None = None
        self._gone: set[int] = set()
        self._told = 0  # messages of the leader: what is reported is an answer to one
        self._reports: list[Any] = []
        self._store: Any = None
        self.patience = timeout
        self._tags = itertools.count(_DATA)
        self._group: Any = None if self.size == 1 else self._meet(meeting)

    @property
    def leads(self) -> bool:
        """Whether this is the rank that talks to workers."""
        return self.me == 0

    @property
    def others(self) -> range:
        """Leader: the places in :attr:`members` of all others."""
        return range(1, self.size)

    def close(self) -> None:
        """Let the others go: what they wait for from this rank fails."""
        group, self._group = self._group, None
        self._reports.clear()
        self.broken = self.broken or LifecycleError("this scheme was shut down")
        disown(group)

    def abort(self) -> None:
        """Cut all connections: who waits for this rank, or will, hears of it now."""
        if self._group is not None:
            self._group.abort()

    def tell(self, message: Message) -> None:
        """Leader: a message to all others."""
        self.tell_each(dict.fromkeys(self.others, message))

    def tell_each(self, messages: Mapping[int, Message]) -> None:
        """Leader: a message to each of the others."""
        self._told += 1
        problems: list[Exception] = []
        sent: list[tuple[int, Any]] = []
        for to, message in messages.items():
            if to not in self._gone:
                with _collect(problems):
                    sent += [(to, work) for work in self._send(to, {**message, "number": self._told})]
        deadline = time.monotonic() + self.timeout
        for to, work in sent:
            if to not in self._gone:
                with _collect(problems):
                    self._wait(to, work, self.timeout, deadline)
        if problems:
            raise problems[0]

    def hear(self) -> list[Message]:
        """Leader: what each of the others reports.

        Raises:
            Exception: what one of them raised, or that it is gone; see :meth:`step`.
        """
        deadline = time.monotonic() + self.timeout
        heard = [self._hear(who, deadline) for who in self.others]
        for who, message in zip(self.others, heard, strict=True):
            if "error" in message:
                raise error_from_wire(message["error"], self.name(who), foreign=True)
        return heard

    def _hear(self, who: int, deadline: float) -> Message:
        while True:
            message = self._receive(who, self.timeout, deadline)
            if message["to"] == self._told:  # else the leader failed before it heard that
                return message

    def listen(self) -> Message:
        """Others: what the leader says next."""
        message = self._receive(0, self.patience)
        self._told = message["number"]
        return message

    def report(self, message: Message | None = None) -> None:
        """Others: answer the leader; does not wait until it hears, which it may never do."""
        self._reports = [work for work in self._reports if not work.is_completed()]
        self._reports += self._send(0, {**(message or {}), "to": self._told})

    def new_tag(self) -> int:
        """Leader: names data that nobody sent yet."""
        return next(self._tags)

    def push(self, data: torch.Tensor, tag: int, to: int = 0) -> Any:
        """Begin to send bytes, to the leader; they stay as they are until :meth:`finish`."""
        return self._begin(to, lambda: self._group.send([data], to, tag))

    def pull(self, who: int, into: torch.Tensor, tag: int) -> Any:
        """Leader: begin to receive bytes; they are there after :meth:`finish`."""
        return self._begin(who, lambda: self._group.recv([into], who, tag))

    def finish(self, who: int, work: Any) -> None:
        """Wait until what was begun is done."""
        self._wait(who, work, self.timeout)

    def _send(self, to: int, message: Message) -> list[Any]:
        body = json.dumps(message, separators=(",", ":")).encode()
        front = len(body).to_bytes(_LENGTH_BYTES, "little") + body[: _FRAME - _LENGTH_BYTES]
        rest = body[_FRAME - _LENGTH_BYTES :]
        frames = [(_FIRST, front.ljust(_FRAME, b"\0")), *([(_REST, rest)] if rest else [])]
        return [self.push(_bytes(data), tag, to) for tag, data in frames]

    def _receive(self, who: int, timeout: float, deadline: float | None = None) -> Message:
        front = self._take(who, _FRAME, _FIRST, timeout, deadline)
        length = int.from_bytes(front[:_LENGTH_BYTES], "little")
        body = front[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if length > len(body):
            body += self._take(who, length - len(body), _REST, timeout, deadline)
        message: Message = json.loads(body)
        return message

    def _take(self, who: int, nbytes: int, tag: int, timeout: float, deadline: float | None) -> bytes:
        into = torch.empty(nbytes, dtype=torch.uint8)
        self._wait(who, self.pull(who, into, tag), timeout, deadline)
        return into.numpy().tobytes()

    def _begin(self, who: int, begin: Callable[[], Any]) -> Any:
        if self._group is None:
            raise self.broken or LifecycleError("this scheme was shut down")
        try:
            return begin()
        except RuntimeError as error:
            raise self._lost(who, error, 0.0) from None

    def _wait(self, who: int, work: Any, timeout: float, deadline: float | None = None) -> None:
        left = timeout if deadline is None else max(deadline - time.monotonic(), _MOMENT)
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise self._lost(who, error, timeout) from None

    def _lost(self, who: int, error: Exception, timeout: float) -> Exception:
        """A rank that does not take part is not waited for again: nobody knows what it would say next."""
        text, rank = _brief(error), self.name(who)
        lost: Exception
        if not self.leads and (why := self._last_words()) is not None:
            lost = error_from_wire(why)
        elif "imed out" in text or "timing out" in text:
            lost = SyncTimeoutError(
                f"{rank} took no part for {timeout:g} s; every rank makes the same calls of the scheme "
                "(or raise timeout=)"
            )
        else:
            lost = SyncFailedError(f"{rank} is gone ({text})", {})
        if self.leads and self.broken is None:
            self._leave_words(lost)
        self.broken = self.broken or lost
        self._gone.add(who)
        return lost

    def _leave_words(self, error: Exception) -> None:
        """Leader: tell why, to those whom gloo cuts off as well when one rank is late."""
        with contextlib.suppress(RuntimeError):  # the store is gone too
            self._store.set("why", json.dumps(error_to_wire(error)))

    def _last_words(self) -> Message | None:
        with contextlib.suppress(RuntimeError):
            self._store.wait(["why"], _LAST_WORDS)
            return json.loads(self._store.get("why"))  # type: ignore[no-any-return]
        return None

    def name(self, who: int) -> str:
        """What to call a rank."""
        return f"rank {self.members[who]} of the trainer"

    def _meet(self, timeout: float) -> Any:
        number = next(_numbers.setdefault(tuple(self.members), itertools.count()))
        name = f"weight_update/ranks/{'-'.join(map(str, self.members))}/{number}"
        self._store = PrefixStore(name, dist.distributed_c10d._get_default_store())
        try:
            group = ProcessGroupGloo(self._store, self.me, self.size, timedelta(seconds=timeout))
        except RuntimeError as error:
            raise SyncTimeoutError(
                f"the ranks {self.members} of the trainer did not all call init_on_sender() within "
                f"{timeout:g} s; where not all ranks train, give GatherShards(group=...) "
                f"({_brief(error)})"
            ) from None
        return own(group)


@contextlib.contextmanager
def _collect(problems: list[Exception]) -> Iterator[None]:
    try:
        yield
    except WeightSyncError as error:
        problems.append(error)


def _brief(error: Exception) -> str:
    """What gloo says, without the place in its source and its advice."""
    text = str(error).partition("\n")[0].partition(". ")[0]
    return text.partition("] ")[2] if text.startswith("[/") else text


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
