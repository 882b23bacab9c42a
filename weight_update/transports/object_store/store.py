"""Objects below one URL, which fsspec reads and writes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from typing import Any, TypeVar

from weight_update.errors import LinkClosedError, SyncTimeoutError, TransportError
from weight_update.text import format_seconds
from weight_update.threads import call_in_thread

_SLICE = 16 << 20  # bytes that a client gets to write at once; it may copy them
_MOST_GIVEN_UP = 8  # requests that may go on after they were given up
_T = TypeVar("_T")


class ObjectStore:
    """Objects below one URL, by names relative to it.

    Each request runs in a thread of its own, because fsspec and the clients behind it may wait for longer
    than a caller wants to. A request that is given up goes on in that thread, and may still read the memory
    that it was given. The next write of the same object waits for it, and so does any request while eight of
    them go on.

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
        self._timeout = timeout
        self._closed: Future[None] = Future()
        self._given_up: dict[Future[Any], tuple[str, str]] = {}  # requests that still run: verb and name

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

    def read(self, name: str, start: int, stop: int, timeout: float | None) -> bytes:
        """Return the bytes of an object from ``start`` to ``stop``, or to its end if that comes first.

        Raises:
            FileNotFoundError: there is no such object.
            SyncTimeoutError: the store did not answer in time.
            TransportError: it cannot be read; or the store was closed.
        """
        return self._request("read", name, timeout, self._cat, start, stop)

    def _cat(self, path: str, start: int, stop: int) -> bytes:
        try:
            found: bytes = self._fs.cat_file(path, start=start, end=stop)
        except FileNotFoundError:
            raise
        except Exception:
            if self._fs.size(path) != 0:
                raise
            return b""  # S3 finds no such bytes in an empty object
        return found

    def write(self, name: str, parts: Iterable[bytes | memoryview], timeout: float | None) -> None:
        """Write an object. In file systems, readers may see a part of it meanwhile.

        Raises:
            SyncTimeoutError: the store did not answer in time.
            TransportError: it cannot be written; or the store was closed.
        """
        self._request("write", name, timeout, self._put, list(parts))

    def replace(self, name: str, raw: bytes, draft: str, timeout: float | None) -> None:
        """Write an object that readers see either as it was or as a whole; raise as :meth:`write`.

        In a directory, it is written under the name ``draft`` first.
        """
        self._request("write", name, timeout, self._exchange, raw, f"{self._root}/{draft}")

    def _exchange(self, path: str, raw: bytes, draft: str) -> None:
        if self._is_directory:
            self._put(draft, [raw])
            os.replace(draft, path)  # mv() of older versions of fsspec copies
        else:
            self._fs.pipe_file(path, raw)

    def _put(self, path: str, parts: list[bytes | memoryview]) -> None:
        try:
            self._write_into(path, parts)
        except FileNotFoundError:
            if self._fs.async_impl:  # object stores have no directories, and would make a bucket
                raise
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._write_into(path, parts)

    def _write_into(self, path: str, parts: list[bytes | memoryview]) -> None:
        try:
            with self._fs.open(path, "wb") as file:
                for part in parts:
                    for start in range(0, len(part), _SLICE):
                        file.write(part[start : start + _SLICE])
        except Exception:
            if self._is_directory:  # a part of the object would take up the last space of a full disk
                with contextlib.suppress(OSError):
                    os.remove(path)
            raise

    def names(self) -> list[str]:
        """Return the names of all objects; raise as :meth:`read`."""
        return self._request("list", "", None, self._find)

    def _find(self, path: str) -> list[str]:
        self._fs.invalidate_cache()
        return [found[len(self._root) + 1 :] for found in self._fs.find(path.rstrip("/"))]

    def remove(self, names: list[str]) -> None:
        """Remove objects in one request, and directories that are empty then; raise as :meth:`read`."""
        self._request("remove", f"{len(names)} objects", None, self._remove, names)

    def _remove(self, _: str, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another sender was faster
                self._fs.rm_file(f"{self._root}/{name}")
        if self._is_directory:
            for folder in {os.path.dirname(f"{self._root}/{name}") for name in names}:
                with contextlib.suppress(OSError):  # it has other files
                    os.rmdir(folder)

    def _request(
        self, verb: str, name: str, timeout: float | None, call: Callable[..., _T], *arguments: Any
    ) -> _T:
        self._require_open()
        limit = self._timeout if timeout is None else min(timeout, self._timeout)
        late = f"could not {verb} {self.url}/{name} within {format_seconds(limit)}"
        deadline = time.monotonic() + limit
        if not self._may_begin(verb, name, limit):
            raise SyncTimeoutError(f"{late}: an earlier request still runs")
        path = f"{self._root}/{name}"
        try:
            answer = call_in_thread("weight_update-object-store", call, path, *arguments, in_order=True)
        except RuntimeError as error:  # there may be one for the next request
            raise TransportError(f"cannot {verb} {self.url}/{name}: {error}") from None
        if not self._await([answer], max(deadline - time.monotonic(), 0.0)):
            self._given_up[answer] = verb, name
            raise SyncTimeoutError(f"{late}; raise timeout= if the store is slow")
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

    def _may_begin(self, verb: str, name: str, limit: float) -> bool:
        """Wait for requests that were given up, if need be; return whether another one may begin."""
        running = self._given_up = {one: key for one, key in self._given_up.items() if not one.done()}
        before = [one for one, key in running.items() if verb == "write" and key == (verb, name)]
        if not before and len(running) >= _MOST_GIVEN_UP:
            before = list(running)
        return not before or self._await(before, limit)

    def _await(self, answers: list[Future[Any]], limit: float) -> bool:
        """Return whether one of ``answers`` came in time; raise LinkClosedError if the store is closed."""
        wait([*answers, self._closed], limit, FIRST_COMPLETED)
        self._require_open()
        return any(answer.done() for answer in answers)

    def _require_open(self) -> None:
        if self.closed:
            raise LinkClosedError("this end was closed")
