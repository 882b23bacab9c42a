"""Actors that are workers, and why they died."""

from __future__ import annotations

from typing import Any

from weight_update.errors import LinkClosedError, SyncFailedError
from weight_update.text import brief
from weight_update.threads import in_threads
from weight_update.transports.ray.rendezvous import (
    call,
    import_ray,
    is_done,
    ray_runs,
    result_of,
)

_PROBE_SECONDS = 2.0
"""Seconds to wait for Ray's reason of a lost link.

If Ray starts an actor again, it gives no reason until the new process runs, which takes 1 to 2 s. The first
``send()`` after the death of such an actor takes as long.
"""
_PROBES = 32
"""Most actors that are asked at a time."""


class ActorWatch:
    """State of the actors that are workers, whose handles by worker index may change."""

    def __init__(self, actors: dict[int, Any]) -> None:
        self.actors = actors
        self._probes: dict[int, tuple[Any, Any]] = {}

    def alive(self, idx: int) -> bool:
        """Return whether the actor may still come; do not wait for a busy one."""
        return self._trouble(idx, 0.0)[0]

    def named(self, idx: int, error: Exception) -> Exception:
        """Return ``error`` of a lost link with the name of the actor and why it died."""
        if idx not in self.actors or not isinstance(error, LinkClosedError):
            return error
        _, trouble = self._trouble(idx, _PROBE_SECONDS)
        name = f"{self.actors[idx]!r}: "
        return LinkClosedError(name + (trouble or str(error).removeprefix(name)))

    def all_named(self, error: SyncFailedError) -> SyncFailedError:
        """Return ``error`` with the names of the actors that died."""
        found = in_threads(lambda one: self.named(*one), [*error.failures.items()], _PROBES)  # each may wait
        failures = dict(zip(error.failures, found, strict=True))
        lines = "".join(f"\n  worker {idx}: {one}" for idx, one in sorted(failures.items()))
        return SyncFailedError(brief(error) + lines, failures, error.report)

    def _trouble(self, idx: int, seconds: float) -> tuple[bool, str | None]:
        """Return whether the actor may be alive, and Ray's reason if it is not well."""
        actor = self.actors.get(idx)
        if actor is None or not ray_runs():
            return True, None
        errors = import_ray().exceptions
        known, probe = self._probes.pop(idx, (None, None))
        try:
            if known is not actor or seconds:  # an old call may have been answered before the actor died
                # waits behind the methods of a busy actor, fails if it died
                probe = call(actor.__ray_ready__)
            if not is_done(probe, seconds):
                self._probes[idx] = actor, probe
                return True, None
            result_of(probe)
        except LinkClosedError as ended:
            return True, str(ended)
        except errors.ActorUnavailableError:
            return True, "it ended, and Ray starts it again"
        except errors.RayActorError as error:
            return False, " ".join(str(error).split())
        return True, None
