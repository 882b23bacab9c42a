"""Errors as messages between the ranks of a sharded trainer."""

from __future__ import annotations

from typing import Any

import weight_update.errors as known_errors
from weight_update.errors import SchemaMismatchError, SyncFailedError, WeightSyncError, WorkerError

__all__ = ["error_from_wire", "error_to_wire"]

Message = dict[str, Any]


def error_to_wire(error: BaseException) -> Message:
    """Return an error in a form that JSON can hold."""
    wire: Message = {"type": type(error).__name__, "text": str(error)}
    if isinstance(error, SchemaMismatchError):
        wire = {**wire, "text": str(error).partition("\n")[0], "problems": error.problems}
    if isinstance(error, SyncFailedError):
        wire["failures"] = {idx: error_to_wire(one) for idx, one in error.failures.items()}
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
        failures = {int(idx): error_from_wire(one) for idx, one in wire["failures"].items()}
        return SyncFailedError(text, failures)
    if isinstance(known, type) and issubclass(known, WeightSyncError):
        found: Exception = known(text)
        return found
    if who is None:
        return WorkerError(f"{wire['type']}: {text}")
    return SyncFailedError(f"{who} failed: {wire['type']}: {text}", {})
