"""Updates of SGLang's weights, of an engine in this process or of a server."""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from weight_update.engines.base import InferenceEngine, WeightChange
from weight_update.engines.exclusive import Weight, batches, by_module
from weight_update.engines.samples import BaseLostError
from weight_update.engines.sglang.loader import pack
from weight_update.engines.sglang.memory import SharedBatch
from weight_update.errors import UnreachableMemoryError, WeightSyncError, undo_on_error
from weight_update.text import plural

LOADER = "weight_update.engines.sglang.load"
_STAGE_SECONDS = 60.0
"""Seconds that later pipeline stages may take to read weights; SGLang answers when the first one has."""

_log = logging.getLogger(__name__)


class SGLangCalls(ABC):
    """The calls of SGLang that an update needs; each raises RuntimeError if SGLang reports a failure."""

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Return SGLang's options, and its version."""

    @abstractmethod
    def begin(self) -> None:
        """Open a session of weight updates."""

    @abstractmethod
    def load(self, order: str) -> None:
        """Have each scheduler process carry out ``order`` by our loader."""

    @abstractmethod
    def end(self) -> None:
        """Close the session; SGLang then transforms weights that it stores in another form."""

    @abstractmethod
    def flush(self) -> None:
        """Drop cached prefixes."""

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Set SGLang's ``weight_version``."""


class SGLangEngineBase(InferenceEngine):
    """The base of the engines that load weights into SGLang, in one session for each update.

    A subclass calls :meth:`_prepare` in its constructor, and opens and closes sessions.
    """

    last_patch: dict[str, bool]

    def _prepare(self, calls: SGLangCalls, *, batch_bytes: int, loads_changes: bool) -> None:
        """Prepare for updates.

        Args:
            calls: how SGLang is called.
            batch_bytes: bytes of shared memory, unless the weights of one module are larger.
            loads_changes: as :attr:`~weight_update.InferenceEngine.loads_changes`.

        Raises:
            RuntimeError: SGLang was not started with our loader.
        """
        self._calls, self._batch_bytes = calls, batch_bytes
        self.loads_changes = loads_changes
        self.last_patch = {}
        info = calls.info()
        if LOADER not in (info.get("custom_weight_loader") or ()):
            raise RuntimeError(
                f"SGLang {info.get('version')} runs without our weight loader; start the server with "
                f"--custom-weight-loader {LOADER}, or the engine with custom_weight_loader=[{LOADER!r}]"
            )
        stages = int(info.get("pp_size", 1))
        self._ranks = stages * int(info["tp_size"])
        self._answer_seconds = _STAGE_SECONDS if stages > 1 else 0.0
        self._loaded = False  # whole weights, in this update
        self._held: list[Weight] = []  # whole weights of a module of which more may come
        self._names: set[str] = set()  # of the weights of the last whole version
        self._used: set[str] = set()  # those of them that SGLang uses
        self._unused: set[str] = set()  # those of which a warning was logged
        self._reloaded: set[str] | None = None  # in each update; None: not known before the first patch
        self._memory = SharedBatch()
        weakref.finalize(self, self._memory.close)

    def _open_session(self) -> None:
        """Open a session; end one that a receiver before this one has left."""
        self._loaded, self._held = False, []
        with undo_on_error(self._abort_quietly):  # it may be open, and only the answer was lost
            try:
                self._calls.begin()
            except RuntimeError as error:
                if "already open" not in str(error):
                    raise
                self._calls.end()
                self._calls.begin()

    def _abort_quietly(self) -> None:
        with contextlib.suppress(RuntimeError, WeightSyncError):
            self._abort_session()

    def load_weights(self, weights: Iterator[Weight]) -> None:
        """Load whole weights; raise RuntimeError with SGLang's traceback if that failed.

        If they come in chunks, those of the last module wait for the next call, or for the end of the update.
        """
        if not self._loaded:
            self._names, self._used = set(), set()
        modules = by_module(itertools.chain(self._held, weights))
        self._load_modules(self._all_but_last(modules) if self.loads_in_chunks else modules)

    def _all_but_last(self, modules: Iterable[list[Weight]]) -> Iterator[list[Weight]]:
        last: list[Weight] = []
        for module in modules:
            if last:
                yield last
            last = module
        self._held = [(name, weight.clone()) for name, weight in last]

    def _load_modules(self, modules: Iterable[list[Weight]]) -> None:
        for batch in batches(modules, self._batch_bytes):
            self._used.update(self._order("weights", batch))
            self._names.update(name for name, _ in batch)
        self._loaded, self._reloaded = True, None

    def needs_with(self, changed: Collection[str]) -> Collection[str]:
        """Return the weights of modules that SGLang transforms; all weights if these are not known yet."""
        return self._names if self._reloaded is None else self._reloaded

    def load_changes(self, changes: Iterator[WeightChange], base: int) -> None:
        """Load changes, in place where SGLang stores the elements as they are.

        Raises:
            BaseLostError: SGLang has discarded or replaced the weights; nothing was loaded.
            RuntimeError: SGLang reports a failure, or weights of :meth:`needs_with` are missing.
        """
        found = self._order("compare", [])
        if self._reloaded is None:
            self._reloaded = self._names.intersection(found)
        reloaded = self._reloaded
        whole: dict[str, torch.Tensor] = {}
        in_place: dict[str, bool] = {}

        def elements() -> Iterator[tuple[str, torch.Tensor]]:
            for change in changes:
                if change.name not in reloaded and change.positions is not None and not len(change.positions):
                    continue
                whole[change.name] = change.weight
                in_place[change.name] = change.positions is not None and change.name not in reloaded
                yield change.name, pack(change)

        for batch in batches(([one] for one in elements()), self._batch_bytes):
            written = self._order("elements", batch)
            for name, _ in batch:
                in_place[name] = in_place[name] and written.get(name, False)  # missing: no process has it
        if missing := reloaded - whole.keys():
            raise RuntimeError(
                f"SGLang transforms these weights, and needs them: {', '.join(sorted(missing))}"
            )
        left = [(name, whole[name]) for name, good in in_place.items() if not good]
        for batch in batches(by_module(left), self._batch_bytes):
            self._order("weights", batch)
        if left:
            self._order("remember", [])
        _log.debug("%d of %d changed weights written in place", sum(in_place.values()), len(in_place))
        self.last_patch = in_place

    def _close_session(self, version: int) -> None:
        """End the session, drop cached prefixes, which belong to other weights, and set the version."""
        if self._held:
            self._load_modules([self._held])
        if self._loaded:
            self._order("remember", [])
            self._warn_of_unused()
        self._calls.end()
        self._calls.flush()
        self._calls.set_version(version)

    def _warn_of_unused(self) -> None:
        unused = sorted(self._names - self._used)
        if not self._unused.issuperset(unused):
            self._unused.update(unused)
            names = f"{', '.join(unused[:10])}{', ...' if len(unused) > 10 else ''}"
            _log.warning(
                "SGLang's model does not use %s: %s. Weights need the names that checkpoints have; "
                "with tied embeddings, lm_head is not used",
                plural(len(unused), "weight"),
                names,
            )

    def _abort_session(self) -> None:
        """End the session of an update that failed, unless it was ended before the failure."""
        try:
            self._calls.end()
        except RuntimeError as error:
            if "no weight-update session is open" not in str(error):
                raise

    def _order(self, kind: str, batch: list[tuple[str, torch.Tensor]]) -> dict[str, bool]:
        """Send a batch; return for each weight that some process has whether all wrote it in place."""
        self._calls.load(self._memory.write(kind, dict(batch)))
        answers = self._memory.answers(self._ranks, self._answer_seconds)
        for content in answers:
            if "lost" in content:
                raise BaseLostError(content["lost"])
            if "error" in content:
                which = f"{batch[0][0]!r} to {batch[-1][0]!r}" if batch else "a version"
                raise RuntimeError(f"SGLang did not load {which}:\n{content['error']}")
        if len(answers) < self._ranks:
            seconds = self._answer_seconds
            late = f", or are pipeline stages that took longer than {seconds:g} s" if seconds else ""
            raise UnreachableMemoryError(
                f"{len(answers)} of SGLang's {self._ranks} processes read the weights; the others cannot "
                f"open this process's memory{late}: run the receiver as the same user, on the same host and "
                "in the same container as the server"
            )
        found: list[dict[str, bool]] = [content["in_place"] for content in answers]
        return {name: all(one.get(name, True) for one in found) for name in set().union(*found)}
