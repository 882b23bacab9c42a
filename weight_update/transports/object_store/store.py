"""Objects below one URL, which fsspec reads and writes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from weight_update.errors import LinkClosedError, SyncTimeoutError, TransportError
from weight_update.text import format_seconds
from weight_update.threads import call_in_thread
from weight_update.transports.socket_stream import seconds_left

_AT_A_TIME = 8  # objects; one connection to an object store has a tenth of the speed of a network
_MOST_GIVEN_UP = 4 * _AT_A_TIME  # requests that may go on after they were given up
Bytes = bytes | memoryview


@dataclass(eq=False)
class _Request:
    """A request, and the future answer.

    Attributes:
        limit: seconds that it may take, or those that it may take together with others.
        deadline: when these are over, on the monotonic clock.
    """

    verb: str
    name: str
    limit: float
    deadline: float
    answer: Future[Any] = field(default_factory=Future)


class ObjectStore:
    """Objects below one URL, by names relative to it.

    Each request runs in a thread of its own, because fsspec and the clients behind it may wait for longer
    than a caller wants to. The thread also computes the digest of the object. A request that is given up goes
    on in that thread, and may still read the memory that it was given. The next write of the same object
    waits for it, and so does any request while 32 of them go on.

    Args:
        url: URL that fsspec knows, such as ``"s3://bucket/run"``, or the path of a directory.
        storage_options: arguments of the file system of fsspec.
        timeout: seconds that one request may take.

    Raises:
        ValueError: fsspec does not know the protocol of the URL, or would keep copies of objects.
        ImportError: the package of the protocol is not installed; the message names it.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any], timeout: float) -> None:
        import fsspec  # it imports compressions where they are installed
        from fsspec.implementations.cached import CachingFileSystem
        from fsspec.implementations.local import LocalFileSystem

        self.url = url.rstrip("/")
        self._fs, self._root = fsspec.core.url_to_fs(url, **storage_options)
        if isinstance(self._fs, CachingFileSystem):
            raise ValueError(
                f"url={url!r} keeps copies of objects, so that a worker would never see a new version; leave "
                f"{url.partition('::')[0] + '::'!r} out"
            )
        self._root = self._root.rstrip("/")
        self._is_directory = isinstance(self._fs, LocalFileSystem)
        # Other packages, such as that for SFTP, may have one connection, which threads cannot share.
        self._at_a_time = _AT_A_TIME if self._is_directory or self._fs.async_impl else 1
        self._timeout = timeout
        self._closed: Future[None] = Future()
        self._given_up = set[_Request]()  # requests that still run, perhaps

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed.done()

    def close(self) -> None:
        """Have waiting and later calls raise LinkClosedError; calling this twice is fine."""
        with contextlib.suppress(InvalidStateError):  # another thread did it
            self._closed.set_result(None)

    def rest(self, seconds: float) -> None:
        """Wait for some time; raise LinkClosedError if the store is closed meanwhile."""
        wait([self._closed], seconds)
        self._require_open()

    def read(self, name: str, limit: int, deadline: float | None) -> bytes:
        """Return the first bytes of an object, at most ``limit``.

        Raises:
            FileNotFoundError: there is no such object.
            SyncTimeoutError: the store did not answer in time.
            TransportError: it cannot be read; or the store was closed.
        """
        found: bytes = self._result(self._begin("read", name, deadline, self._get, limit))
        return found

    def read_all(
        self, objects: Iterable[tuple[str, int]], deadline: float | None
    ) -> Generator[tuple[bytes, bytes], None, None]:
        """Yield the first bytes of each object, and their SHA-256 digest; raise as :meth:`read`.

        ``objects`` are names, each with a number of bytes. Several objects may be read at a time.
        """

        def get(path: str, nbytes: int) -> tuple[bytes, bytes]:
            found = self._get(path, nbytes)
            return found, hashlib.sha256(found).digest()

        return self._each("read", ((name, get, nbytes) for name, nbytes in objects), deadline)

    def _get(self, path: str, limit: int) -> bytes:
        try:
            found: bytes = self._fs.cat_file(path, start=0, end=limit)
        except FileNotFoundError:
            raise
        except Exception:
            if self._fs.size(path) != 0:
                raise
            return b""  # S3 finds no such bytes in an empty object
        return found

    def write_all(
        self, objects: Iterable[tuple[str, Sequence[Bytes]]], deadline: float | None
    ) -> list[bytes]:
        """Write objects, perhaps several at a time, and return the SHA-256 digest of each.

        ``objects`` are names, each with parts that follow one another. In file systems, readers may see a
        part of an object meanwhile.

        Raises:
            SyncTimeoutError: the store did not answer in time.
            TransportError: an object cannot be written; or the store was closed.
        """

        def put(path: str, parts: Sequence[Bytes]) -> bytes:
            digest = hashlib.sha256()
            for part in parts:
                digest.update(part)
            self._put(path, parts)
            return digest.digest()

        return list(self._each("write", ((name, put, parts) for name, parts in objects), deadline))

    def replace(self, name: str, raw: bytes, draft: str, deadline: float | None) -> None:
        """Write an object that readers see either as it was or as a whole; raise as :meth:`write_all`.

        In a directory, it is written under the name ``draft`` first.
        """
        self._result(self._begin("write", name, deadline, self._exchange, raw, f"{self._root}/{draft}"))

    def _exchange(self, path: str, raw: bytes, draft: str) -> None:
        if self._is_directory:
            self._put(draft, [raw])
            os.replace(draft, path)  # mv() of older versions of fsspec copies
        else:
            self._fs.pipe_file(path, raw)

    def _put(self, path: str, parts: Sequence[Bytes]) -> None:
        try:
            self._write_into(path, parts)
        except FileNotFoundError:
            if self._fs.async_impl:  # object stores have no directories, and would make a bucket
                raise
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._write_into(path, parts)

    def _write_into(self, path: str, parts: Sequence[Bytes]) -> None:
        if not self._is_directory:
            self._fs.pipe_file(path, b"".join(parts))
            return
        try:
            with self._fs.open(path, "wb") as file:
                file.writelines(parts)
        except Exception:  # a part of the object would take up the last space of a full disk
            with contextlib.suppress(OSError):
                os.remove(path)
            raise

    def names(self) -> list[str]:
        """Return the names of all objects; raise as :meth:`read`."""
        names: list[str] = self._result(self._begin("list", "", None, self._find))
        return names

    def _find(self, path: str) -> list[str]:
        self._fs.invalidate_cache()
        return [found[len(self._root) + 1 :] for found in self._fs.find(path.rstrip("/"))]

    def remove(self, names: list[str]) -> None:
        """Remove objects, and directories that are empty then; raise as :meth:`read`."""
        groups = [names] if self._is_directory else [[name] for name in names]
        calls = ((group[0], self._remove, group) for group in groups)
        deque(self._each("remove", calls, None), maxlen=0)

    def _remove(self, _: str, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another sender was faster
                self._fs.rm_file(f"{self._root}/{name}")
        if self._is_directory:
            for folder in {os.path.dirname(f"{self._root}/{name}") for name in names}:
                with contextlib.suppress(OSError):  # it has other files
                    os.rmdir(folder)

    # -- requests ----------------------------------------------------------------------------------

    def _each(
        self, verb: str, calls: Iterable[tuple[Any, ...]], deadline: float | None
    ) -> Generator[Any, None, None]:
        """Yield the results of calls in order; each is a name, a function, and arguments behind the path."""
        running: deque[_Request] = deque()
        limit = self._limit(deadline)
        try:
            for name, call, *arguments in calls:
                begin = partial(self._begin, verb, name, deadline, call, *arguments)
                while (request := self._begin_beside(running, begin)) is None:
                    yield self._result(running[0])
                    running.popleft()
                running.append(request)
                request.limit = limit
            while running:
                yield self._result(running[0])
                running.popleft()
        finally:
            self._given_up.update(running)  # after an error

    def _begin_beside(self, running: Sequence[_Request], begin: Callable[[], _Request]) -> _Request | None:
        """Return ``begin()``; None if a running request has to end first, as where threads are few."""
        try:
            return begin() if len(running) < self._at_a_time else None
        except TransportError:
            if not running:
                raise
            return None

    def _begin(
        self, verb: str, name: str, deadline: float | None, call: Callable[..., Any], *arguments: Any
    ) -> _Request:
        self._require_open()
        limit = self._limit(deadline)
        request = _Request(verb, name, limit, time.monotonic() + limit)
        if not self._may_begin(request):
            raise SyncTimeoutError(f"{self._late(request)}: an earlier request still runs")
        path = f"{self._root}/{name}"
        try:
            request.answer = call_in_thread(
                "weight_update-object-store", call, path, *arguments, in_order=True
            )
        except RuntimeError as error:  # there may be one for the next request
            raise TransportError(f"cannot {verb} {self.url}/{name}: {error}") from None
        return request

    def _result(self, request: _Request) -> Any:
        verb, name, answer = request.verb, request.name, request.answer
        if not self._await([answer], max(request.deadline - time.monotonic(), 0.0)):
            self._given_up.add(request)
            raise SyncTimeoutError(f"{self._late(request)}; raise timeout= if the store is slow")
        try:
            return answer.result()
        except FileNotFoundError as error:
            if verb == "write":
                raise TransportError(f"cannot write {self.url}/{name}: {error}") from error
            raise
        except Exception as error:  # clients of object stores raise errors of all kinds
            reason = f"{type(error).__name__}: {error}"
            if verb == "write" and isinstance(error, NotImplementedError):
                reason = "fsspec only reads such URLs; give the trainer one that it can write"
            raise TransportError(f"cannot {verb} {self.url}/{name}: {reason}") from error

    def _limit(self, deadline: float | None) -> float:
        left = seconds_left(deadline)
        return self._timeout if left is None else min(left, self._timeout)

    def _late(self, request: _Request) -> str:
        return f"could not {request.verb} {self.url}/{request.name} within {format_seconds(request.limit)}"

    def _may_begin(self, request: _Request) -> bool:
        """Wait for requests that were given up, if need be; return whether another one may begin."""
        self._given_up = {one for one in self._given_up if not one.answer.done()}
        writes = [one for one in self._given_up if one.verb == request.verb == "write"]
        before = [one.answer for one in writes if one.name == request.name]
        if not before and len(self._given_up) >= _MOST_GIVEN_UP:
            before = [one.answer for one in self._given_up]
        return not before or self._await(before, request.limit)

    def _await(self, answers: list[Future[Any]], limit: float) -> bool:
        """Return whether one of ``answers`` came in time; raise LinkClosedError if the store is closed."""
        wait([*answers, self._closed], limit, FIRST_COMPLETED)
        self._require_open()
        return any(answer.done() for answer in answers)

    def _require_open(self) -> None:
        if self.closed:
            raise LinkClosedError("this end was closed")
