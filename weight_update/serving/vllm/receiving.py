"""One worker of vLLM as the engine of a receiver."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from typing import TypeVar

import torch

from weight_update.engines.base import InferenceEngine, WeightChange
from weight_update.errors import TransportError, undo_on_error
from weight_update.serving.vllm.control import VLLMServer, end_session
from weight_update.serving.vllm.joining import PauseMode
from weight_update.serving.vllm.loader import ModelLoader
from weight_update.serving.vllm.turns import Turns
from weight_update.threads import call_in_thread

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class LeadingCalls:
    """The calls of a server for each update, made by the worker of rank 0 when the update has come.

    Args:
        url: URL of the server.
        pause: mode of its ``/pause``.
        timeout: seconds that an update may take, by the sender. A call may take as long, and at least 300 s:
            a worker that is only late loads the update after all.
    """

    def __init__(self, url: str, pause: PauseMode, timeout: float) -> None:
        self._server, self._pause = VLLMServer(url, max(timeout, 300.0)), pause
        self._update: Future[None] | None = None

    def begin(self, version: int) -> None:
        """Pause the server and have all of its workers load ``version``."""
        self._server.pause(self._pause)
        self._server.start_weight_update()
        update = {"version": version}
        self._update = call_in_thread("weight_update-vllm-calls", self._server.update_weights, update)

    def check(self) -> None:
        """Raise an error if the server has answered, although this worker is yet to load the version."""
        if self._update is not None and self._update.done():
            self._update.result()
            raise RuntimeError(
                f"{self._server.url} updated other workers than this one; connect_servers() needs a URL that "
                "leads to this server from its own host, not through a load balancer"
            )

    def finish(self, version: int) -> None:
        """Wait until all workers have loaded ``version``; then state it, and generate again."""
        update, self._update = self._update, None
        assert update is not None
        update.result()
        self._server.finish_weight_update(str(version))
        self._server.resume()

    def abort(self, whole: bool) -> None:
        """End an update that failed.

        The server generates again if it was not yet asked to load, and has ``whole`` weights. Otherwise it
        stays paused: its weights may be a mixture.
        """
        asked, self._update = self._update is not None, None
        end_session(self._server)
        if whole and not asked:
            with contextlib.suppress(RuntimeError, TransportError, TimeoutError):
                self._server.resume()


class VLLMReceiver(InferenceEngine):
    """Loads what a receiver gets into the model of one worker of vLLM, in the thread that runs the model.

    Args:
        loader: loads into the model.
        turns: waits for vLLM to ask for updates.
        in_chunks: as :attr:`~weight_update.InferenceEngine.loads_in_chunks`.
        calls: has the server ask for each update; None leaves that to the trainer.
    """

    def __init__(
        self, loader: ModelLoader, turns: Turns, *, in_chunks: bool, calls: LeadingCalls | None
    ) -> None:
        self.loads_in_chunks: bool = in_chunks
        self._loader, self._turns = loader, turns
        self._calls = calls
        self._leading: LeadingCalls | None = None  # during an update that this worker makes the server load
        self._error: BaseException | None = None
        self._version = 0  # that is loaded, or was last
        self._whole = False  # whether the model has all weights of one version

    @property
    def loads_changes(self) -> bool:  # type: ignore[override]
        """Whether patches are loaded weight by weight; see :class:`ModelLoader`."""
        return self._loader.takes_patches

    def begin_update(self, version: int) -> None:
        """Wait until vLLM asks for ``version``; make it ask, if that is this worker's task.

        Raises:
            RuntimeError, TransportError, SyncTimeoutError: the server could not be asked.
            LifecycleError: vLLM shut its weight transfer down.
        """
        self._error, self._version = None, version
        if version == self._turns.version:  # sent again after the connection was lost
            self._turns.settle(None)  # or vLLM's call would return at once
        self._leading = leading = None if self._turns.is_inline else self._calls
        with undo_on_error(self._stop_leading):
            if leading is not None:
                leading.begin(version)
            self._whole = False  # from now on any worker of the server may load
            if leading is None:
                self._turns.admit(version)
            else:
                self._turns.admit(version, leading.check)
            self._in_turn(self._loader.abort)  # of a version whose call ended too early

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._in_turn(lambda: self._loader.load(weights))

    def needs_with(self, changed: Collection[str]) -> Collection[str]:
        return self._loader.needs_with(changed)

    def load_changes(self, changes: Iterator[WeightChange], base: int) -> None:
        counts = self._in_turn(lambda: self._loader.patch(changes))
        _log.info("patch to version %d: %s", self._version, counts)

    def finish_update(self, version: int) -> None:
        self._in_turn(self._loader.finish)
        self._turns.settle(version)
        if self._leading is not None:
            self._leading.finish(version)
            self._leading = None
        self._whole = True
        _log.info("version %d is in force", version)

    def abort_update(self, version: int) -> None:
        """Make the model computable again, and have vLLM's call fail."""
        error = self._error or RuntimeError(f"version {version} was not loaded; the trainer knows the reason")
        try:
            self._turns.run(self._loader.abort)
        finally:
            self._turns.settle(None, error)
            self._stop_leading()

    def _stop_leading(self) -> None:
        leading, self._leading = self._leading, None
        if leading is not None:
            leading.abort(self._whole)

    def _in_turn(self, work: Callable[[], _T]) -> _T:
        try:
            return self._turns.run(work)
        except BaseException as error:
            self._error = error
            raise
