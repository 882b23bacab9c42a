"""The reasons, for the errors of updates, why workers do not have a version."""

from __future__ import annotations

from weight_update.errors import LinkClosedError, SyncTimeoutError
from weight_update.sender.workers import WorkerState
from weight_update.text import format_seconds

ABSENT = "it is not connected; has it called connect()?"


def reason_of(worker: WorkerState, version: int, timeout: float) -> Exception:
    """Return the reason why a worker does not have ``version`` after so many seconds."""
    if (error := worker.failure(version)) is not None:
        return error
    if not (worker.joined or worker.joining):
        return worker.lost or LinkClosedError(ABSENT)
    if not worker.awaited:
        return worker.joining_error or LinkClosedError(
            "it joined while this version was being sent; it gets weights with the next send()"
        )
    if timeout == 0:
        return SyncTimeoutError("has not applied it yet; wait() longer, or ask done(), which raises no error")
    if worker.has_ended:
        reason = (
            "its process has ended (scheme.worker_alive), and the transport did not report it; start it again"
        )
    else:
        reason = (
            f"{delay_of(worker)}; the worker gets the newest version when it goes on, or with the next "
            "send() (or raise timeout=)"
        )
    return SyncTimeoutError(f"did not apply it within {format_seconds(timeout)}: {reason}")


def delay_of(worker: WorkerState) -> str:
    """Return why a worker has not applied the version that it is being sent, or was sent."""
    if worker.writing:
        return "it is still being sent, because the worker or the link is slow or stopped"
    return "it is stopped, or in hold() or a long forward pass, or takes long to apply it"
