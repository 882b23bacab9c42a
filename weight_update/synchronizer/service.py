"""A synchronizer as those who run it see it: calls of plain values, some of which wait."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from weight_update.errors import WeightSyncError
from weight_update.synchronizer.explorer_calls import ExplorerCalls
from weight_update.synchronizer.memory import WeightCache
from weight_update.synchronizer.plan import SyncPlan
from weight_update.synchronizer.sessions import Closed, Refused, Reply, SessionManager, VersionFile
from weight_update.synchronizer.trainer_calls import TrainerCalls

__all__ = ["Service"]

_log = logging.getLogger(__name__)


class Service:
    """One for a run. Calls may come from any thread; each ends within the time it is given.

    Args:
        plan: the rules.
        version_file: where the newest version is remembered.
        memory: MEMORY: where weights are kept.
        lease: seconds after which a client that is not heard of counts as gone; None: for ever.
        timeout: seconds a transfer may take.
        newest: version and step that are published already, if any.
        directory: CHECKPOINT: where the files are.
    """

    def __init__(
        self,
        plan: SyncPlan,
        *,
        version_file: VersionFile | None = None,
        memory: WeightCache | None = None,
        lease: float | None = None,
        timeout: float = 60.0,
        newest: tuple[int, int] | None = None,
        directory: str | None = None,
    ) -> None:
        self.plan = plan
        self.sessions = sessions = SessionManager(plan, version_file, lease, newest, directory)
        self._memory = memory
        trainer, explorer = TrainerCalls(sessions, memory), ExplorerCalls(sessions, memory, timeout)
        self._calls: dict[str, Callable[..., Reply]] = {
            "hello": sessions.hello,
            "bye": sessions.bye,
            "beat": sessions.beat,
            "notify": sessions.notify,
            "status": sessions.status,
            "trainer_needs": trainer.trainer_needs,
            "trainer_version": trainer.trainer_version,
            "trainer_failed": trainer.trainer_failed,
            "trainer_published": trainer.trainer_published,
            "take_from": trainer.take_from,
            "meet": trainer.meet,
            "met": trainer.met,
            "explorer_needs": explorer.explorer_needs,
            "explorer_syncs": explorer.explorer_syncs,
            "explorer_fetched": explorer.explorer_fetched,
            "explorer_gives_up": explorer.explorer_gives_up,
        }

    def call(self, name: str, args: dict[str, Any]) -> Reply:
        """Do what a client asks for.

        Args:
            name: of a method of :class:`SessionManager`, :class:`TrainerCalls` or :class:`ExplorerCalls`.
            args: its arguments.

        Returns:
            its answer; ``{"refused": why}`` if the call makes no sense, ``{"error": text}`` if it failed,
            ``{"closed": text}`` if the synchronizer was closed.
        """
        try:
            if name not in self._calls:
                raise Refused(f"unknown call {name!r:.40}")
            reply = self._calls[name](**args)
            self._remember()
            return reply
        except Closed as error:
            return {"closed": str(error)}
        except Refused as error:
            return {"refused": str(error)}
        except WeightSyncError as error:
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller must hear of it
            _log.exception("a call failed: %s", name)
            return {"error": f"{type(error).__name__}: {error}"}

    def gone(self, session: str) -> None:
        """The connection to a client ended without a word."""
        self.sessions.gone(session)

    def close(self) -> None:
        """Wake everybody and let go of the weights."""
        with contextlib.ExitStack() as stack:  # all of it, also where a step raises
            if self._memory is not None:
                stack.callback(self._memory.close)
            stack.callback(self._remember)
            stack.callback(self.sessions.close)

    def _remember(self) -> None:
        """Write the newest version to the disk; other calls go on meanwhile."""
        if self.sessions.version_file is not None:
            self.sessions.version_file.flush()
