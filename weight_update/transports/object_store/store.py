"""Objects below one URL, which fsspec reads and writes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from weight_update.errors import LinkClosedError, SyncTimeoutError, TransportError
from weight_update.text import format_seconds
from weight_update.threads import start_thread

_T = TypeVar("_T")


class ObjectStore:
    """Objects below one URL, by names relative to it.

    Each request runs in a thread of its own, because fsspec and the clients behind it may wait for longer
    than a caller wants to. A request that is given up goes on in that thread, so the memory and the names
    that it was given must not be used again.

    Args:
        url: URL that fsspec knows, such as ``"s3://bucket/run"``, or the path of a directory.
        storage_options: arguments of the file system of fsspec.
        timeout: seconds that one request may take.

    Raises:
        ValueError: fsspec does not know the protocol of the URL.
        ImportError: the package of the protocol is not installed; the message names it.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any], timeout: float) -> None:
        import fsspec  # it imports compressions where they are installed

        self.url = url
        self._fs, self._root = fsspec.core.url_to_fs(url, **storage_options)
        self._root = self._root.rstrip("/")
        self._timeout = timeout
        self._closed: Future[None] = Future()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed.done()

    def close(self) -> None:
        """Have waiting and later calls raise LinkClosedError; calling this twice is fine."""
        if not self.closed:
            self._closed.set_result(None)

    def rest(self, seconds: float) -> None:
        """Wait for some time; raise LinkClosedError if the store is closed meanwhile."""
        wait([self._closed], seconds)
        self._require_open()

    def read(self, name: str, timeout: float | None = None, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes of an object from ``start`` to ``stop``, or to its end.

        Raises:
            FileNotFoundError: there is no such object.
            SyncTimeoutError: the store did not answer in time.
            TransportError: it cannot be read; or the store was closed.
        """
        limits = {} if stop is None else {"start": start, "end": stop}
        found: bytes = self._request("read", name, timeout, functools.partial(self._fs.cat_file, **limits))
        return found

    def write(self, name: str, parts: Iterable[bytes | memoryview], timeout: float | None = None) -> None:
        """Write an object; readers never see a part of it where the store writes objects as a whole.

        Raises:
            SyncTimeoutError: the store did not answer in time.
            TransportError: it cannot be written; or the store was closed.
        """
        try:
            self._request("write", name, timeout, self._put, list(parts))
        except FileNotFoundError as error:
            raise TransportError(f"cannot write {self.url}/{name}: {error}") from error

    def _put(self, path: str, parts: list[bytes | memoryview]) -> None:
        try:
            self._write_into(path, parts)
        except FileNotFoundError:  # a file system with directories
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._write_into(path, parts)

    def _write_into(self, path: str, parts: list[bytes | memoryview]) -> None:
        with self._fs.open(path, "wb") as file:
            for part in parts:
                file.write(part)

    def names(self) -> list[str]:
        """Return the names of all objects; raise as :meth:`read`."""
        return self._request("list", "", None, self._find)

    def _find(self, path: str) -> list[str]:
        self._fs.invalidate_cache()
        return [found[len(self._root) + 1 :] for found in self._fs.find(path.rstrip("/"))]

    def remove(self, names: list[str]) -> None:
        """Remove objects; raise as :meth:`read`."""
        for name in names:
            self._request("remove", name, None, self._fs.rm_file)

    def _request(
        self, verb: str, name: str, timeout: float | None, call: Callable[..., _T], *arguments: Any
    ) -> _T:
        self._require_open()
        answer: Future[_T] = Future()

        def run() -> None:
            try:
                answer.set_result(call(f"{self._root}/{name}", *arguments))
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                answer.set_exception(error)

        limit = self._timeout if timeout is None else min(timeout, self._timeout)
        start_thread("weight_update-object-store", run, in_order=True)
        either: list[Future[Any]] = [answer, self._closed]
        wait(either, limit, FIRST_COMPLETED)
        self._require_open()
        if not answer.done():
            raise SyncTimeoutError(f"could not {verb} {self.url}/{name} within {format_seconds(limit)}")
        try:
            return answer.result()
        except FileNotFoundError:
            raise
        except Exception as error:  # clients of object stores raise errors of all kinds
            reason = f"{type(error).__name__}: {error}"
            raise TransportError(f"cannot {verb} {self.url}/{name}: {reason}") from error

    def _require_open(self) -> None:
        if self.closed:
            raise LinkClosedError("this end was closed")
