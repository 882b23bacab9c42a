"""The errors that this library raises.

::

    WeightSyncError
     ├── LifecycleError            (RuntimeError)  a call out of order: send before connect, ...
     ├── NothingToSendError        (ValueError)    send(None) with no model, weights or context to read
     ├── UnknownWorkerError        (ValueError)    a worker index this scheme does not serve
     ├── UnsupportedSourceError    (TypeError)     weights of a type or dtype that cannot be extracted
     ├── SchemaMismatchError       (ValueError)    names, shapes or dtypes differ; lists all of them
     ├── ConversionError           (ValueError)    weights that a converter cannot convert
     ├── FormatError               (ValueError)    bytes that are not in the expected format
     ├── NotEnoughMemoryError      (MemoryError)   too little memory for weights
     ├── NotEnoughSpaceError       (OSError)       a checkpoint does not fit on the disk
     ├── CorruptCheckpointError    (ValueError)    a checkpoint on the disk is broken
     ├── TransportError            (ConnectionError)
     │    ├── LinkClosedError                      the other end is gone
     │    ├── JoinRefusedError                     the sender did not admit this receiver
     │    └── UnreachableMemoryError               shared memory that this process cannot open
     ├── SyncTimeoutError          (TimeoutError)  a wait took too long; the message names the other side
     └── WorkerError               (RuntimeError)  an exception inside a worker, with its traceback
          └── SyncFailedError                      some workers failed in one send; ``failures`` by worker
               └── GroupSyncFailedError            the same for several models sent as one step

Each also derives from the builtin in parentheses, so ``except TimeoutError`` works as expected.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import Self

if TYPE_CHECKING:
    from weight_update.report import SyncReport

_E = TypeVar("_E", bound=BaseException)


class WeightSyncError(Exception):
    """Base class of the errors that ``weight_update`` raises."""


class LifecycleError(WeightSyncError, RuntimeError):
    """A method was called out of order; the message names the call that comes first."""


class NothingToSendError(WeightSyncError, ValueError):
    """``send()`` was called without weights, and the sender has no model, weights or context to read."""


class UnknownWorkerError(WeightSyncError, ValueError):
    """A worker index was given that this sender does not serve."""


class UnsupportedSourceError(WeightSyncError, TypeError):
    """Weights cannot be read from, or written to, an object of this type."""


class SchemaMismatchError(WeightSyncError, ValueError):
    """Two sides describe their tensors differently.

    Attributes:
        problems: one line for each name that is missing, unexpected or of another shape or dtype.
    """

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        self.problems: tuple[str, ...] = tuple(problems)
        shown = "".join(f"\n  - {line}" for line in self.problems[:50])
        more = len(self.problems) - 50
        super().__init__(message + shown + (f"\n  ... and {more} more" if more > 0 else ""))


class ConversionError(WeightSyncError, ValueError):
    """A converter was given weights that it cannot convert; the message names them."""


class FormatError(WeightSyncError, ValueError):
    """Bytes do not have the expected format, such as that of a frame (see ``docs/wire_format.rst``)."""


class NotEnoughMemoryError(WeightSyncError, MemoryError):
    """Lack of memory for weights, or of a descriptor for it, here or in a worker; the message says how much.

    Attributes:
        version: in a worker, version of the update that needs the memory; None if it is not known.
    """

    version: int | None = None


class NotEnoughSpaceError(WeightSyncError, OSError):
    """The disk, a quota or a limit of file sizes has no room for a checkpoint.

    The message says how many bytes are needed and free.
    """


class CorruptCheckpointError(WeightSyncError, ValueError):
    """A checkpoint or its manifest differs from what was written."""


class TransportError(WeightSyncError, ConnectionError):
    """A link failed."""


class LinkClosedError(TransportError):
    """The other end of a link is gone."""


class JoinRefusedError(TransportError):
    """The sender refused this receiver: wrong token, unknown worker index, replaced by another process, ...

    Attributes:
        problems: one line for each weight that differs, if that is the reason.
    """

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__(message)


class UnreachableMemoryError(TransportError):
    """A payload lies in memory that this process cannot open; the message says why.

    Attributes:
        version: version of the update that the payload belongs to; None if it is not known.
    """

    version: int | None = None


class SyncTimeoutError(WeightSyncError, TimeoutError):
    """A wait took longer than its timeout; the message names the side that did not answer."""


class WorkerError(WeightSyncError, RuntimeError):
    """An exception was raised inside a worker; the message carries the worker's traceback."""


class SyncFailedError(WorkerError):
    """One or more workers did not apply an update; all others did.

    Attributes:
        failures: the exception of each worker that failed, by worker index.
        report: the :class:`~weight_update.SyncReport` of the update, which covers the others.
    """

    def __init__(
        self, message: str, failures: Mapping[int, Exception], report: SyncReport | None = None
    ) -> None:
        self.failures: dict[int, Exception] = dict(failures)
        self.report = report
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the failures too: errors travel between processes."""
        return type(self), (str(self), self.failures, self.report)


class GroupSyncFailedError(SyncFailedError):
    """One or more workers did not apply an update of several models.

    If a worker could not stage a model, no worker applied any.

    In another process this error arrives as a :class:`SyncFailedError`.

    Attributes:
        by_scheme: the exceptions by scheme and worker index; schemes without failures are left out.
        reports: the report of every scheme.
    """

    def __init__(
        self,
        message: str,
        by_scheme: Mapping[Any, Mapping[int, Exception]],
        reports: Mapping[Any, SyncReport],
    ) -> None:
        self.by_scheme: dict[Any, dict[int, Exception]] = {
            scheme: dict(failures) for scheme, failures in by_scheme.items()
        }
        self.reports: dict[Any, SyncReport] = dict(reports)
        merged: dict[int, Exception] = {}
        for failures in reversed(self.by_scheme.values()):
            merged.update(failures)
        super().__init__(message, merged, self.reports.get(next(iter(self.by_scheme), None)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a :class:`SyncFailedError`: schemes do not travel with an error."""
        return SyncFailedError, (str(self), self.failures, self.report)


def without_frames(error: _E) -> _E:
    """Return ``error`` without the frames it and its causes came through, which keep an update's memory."""
    error.__context__ = None
    causes: list[BaseException] = []
    cause = error.__cause__
    while cause is not None and all(cause is not one for one in causes):  # an error may be its own cause
        cause.__traceback__ = cause.__context__ = None
        causes.append(cause)
        cause = cause.__cause__
    return error.with_traceback(None)


def kept_error(error: _E) -> _E:
    """Return a copy of ``error`` to raise; an object that keeps ``error`` then keeps no frames.

    A raised error refers to the frames it comes through. If one of them refers to the error, directly or
    through an attribute, their memory is only freed by the garbage collector, which may not run for minutes.
    """
    try:
        raised = copy.copy(error)
    except Exception:  # noqa: BLE001 - its constructor may take anything
        return error
    raised.__cause__ = error.__cause__
    return raised


class undo_on_error:
    """A context that calls ``undo`` if an error leaves it.

    With a generator, an error would not be freed at once if ``undo`` raises another one (Python 3.13).
    """

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo = undo

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._undo()


class Closing:
    """A context manager that calls ``close()`` at the end of its block."""

    def close(self) -> None:
        """Release what this object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def close_all(*parts: Any) -> None:
    """Close all parts that are not None, in this order, whatever one of them raises."""
    with contextlib.ExitStack() as rest:
        for part in reversed(parts):
            if part is not None:
                rest.callback(part.close)


def optional(module: str, extra: str) -> Any:
    """Import ``module``; raise an ImportError that names the extra of this package that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f'cannot import {module} ({error}): pip install "weight-update[{extra}]"', name=package
        ) from error
