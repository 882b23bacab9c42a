"""Targets and storages: what the versions on one receiver are written to, and the memory they lie in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weight_update.encodings import Decoder, Delta
from weight_update.encodings.dense import copy_tensors
from weight_update.engines.adapter import Loading, as_expected, engine_errors
from weight_update.engines.base import InferenceEngine, WeightChange
from weight_update.engines.samples import BaseLostError
from weight_update.errors import UnsupportedSourceError
from weight_update.strategy.binding import Binding, require_writable
from weight_update.strategy.named_weights import NamedWeights
from weight_update.strategy.strategy import WeightStrategy
from weight_update.wire.frames import WeightChunk
from weight_update.wire.memory import await_gpu
from weight_update.wire.schema import WeightSchema

_log = logging.getLogger(__name__)


class Target:
    """A target that is memory alone: the receiver keeps weights for ``receive()`` and has no model.

    It is also the base of the other targets.
    """

    binding: Binding | None = None  # tensors of the model that can lie in memory of the receiver
    points = False  # whether the tensors of a model are pointed at other memory, which copies nothing
    takes_over = False  # whether the target is an engine, which hands out no weights
    keeps_tensors = True  # whether the target refers to the tensors of an update while it is in force
    loading: Loading | None = None  # version that an engine has begun and not finished

    def schema(self) -> WeightSchema | None:
        """Return the schema of the weights that the target expects now; None if it takes any.

        Raises:
            UnsupportedSourceError: the target has weights that cannot be synchronized.
        """
        return None if self.binding is None else self.binding.schema()

    def read(self) -> NamedWeights | None:
        """Return the weights of the target, live; None if only the receiver's memory has them."""
        return None if self.binding is None else self.binding.read()

    def device_for(self, payload: torch.Tensor) -> torch.device:
        """Return the device of the memory that weights are copied to out of ``payload``."""
        return torch.device("cpu")

    def follow(self, schema: WeightSchema) -> bool:
        """Find the tensors of a model again if a part of it was replaced; return whether one was.

        Raises:
            SchemaMismatchError: the model has other weights now.
        """
        return False

    def check_extra(self, extra: Mapping[str, Any]) -> None:
        """Raise SchemaMismatchError unless the target takes this extra state."""
        if self.binding is not None:
            self.binding.check_extra(extra)

    def exchange_extra(self, extra: Mapping[str, Any]) -> Callable[[], None]:
        """Set all extra state, or raise an error and set none; return a function that reverts it."""
        return (lambda: None) if self.binding is None else self.binding.exchange_extra(extra)

    def prepare(self, schema: WeightSchema, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return ``values`` converted to what :meth:`write` takes."""
        return values if self.binding is None else self.binding.prepare(schema, values)

    def write(self, names: tuple[str, ...], values: list[torch.Tensor], version: int) -> None:
        """Make the target have ``values``, which :meth:`prepare` returned; nobody may compute meanwhile."""

    def move(self, names: tuple[str, ...], values: list[torch.Tensor]) -> None:
        """Make the target leave the memory that it lies in for that of ``values``, which are equal."""

    def leave(self) -> None:
        """Copy the weights into memory that later updates do not change."""

    def abort(self) -> None:
        """End the version in :attr:`loading`, which will not be completed."""


class ModelTarget(Target):
    """A module, TensorDict or dict; ``stable`` copies into its tensors, which else point at other memory."""

    binding: Binding

    def __init__(self, strategy: WeightStrategy, model: Any, stable: bool) -> None:
        self._strategy, self.binding = strategy, strategy.bind(model)
        self.points = self.binding.points and not stable

    def device_for(self, payload: torch.Tensor) -> torch.device:
        return self.binding.home

    def prepare(self, schema: WeightSchema, values: list[torch.Tensor]) -> list[torch.Tensor]:
        ready = self.binding.prepare(schema, values)
        return with_own_buffers(schema, self.binding, ready) if self.points else ready

    def follow(self, schema: WeightSchema) -> bool:
        if not self.binding.is_stale():
            return False
        fresh = self._strategy.bind(self.binding.destination)
        schema.require_same(fresh.schema(), "the model, a part of which was replaced,", more=True)
        self.binding = fresh
        return True

    def write(self, names: tuple[str, ...], values: list[torch.Tensor], version: int) -> None:
        self.binding.finish_kernels()
        if self.points:
            self.binding.switch(names, values)
        else:
            self.binding.copy(names, values)
        self.binding.finish_kernels()

    def move(self, names: tuple[str, ...], values: list[torch.Tensor]) -> None:
        if self.points:
            self.binding.switch(names, values)
            self.binding.finish_kernels()  # they may still read the former memory

    def leave(self) -> None:
        if self.points:
            self.binding.leave()


def with_own_buffers(
    schema: WeightSchema, binding: Binding, values: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return ``values``; if elements differ in size, copies replace those of a module's buffers.

    In one memory, PyTorch takes tensors whose elements differ in size for overlapping ones. It then does not
    compile a forward pass that writes to one of them, such as batch normalization in training mode.
    """
    if not schema.mixes_sizes:
        return values
    # Tied tensors have equal keys, and so have empty ones of one shape, which lie at one offset.
    rows = zip(schema.offsets, schema.shapes, values, strict=True)
    keys = [(offset, shape, one.dtype) for offset, shape, one in rows]
    targets = binding.tensors(schema.names)
    kept = {key for key, one in zip(keys, targets, strict=True) if isinstance(one, nn.Parameter)}
    sources = {key: one for key, one in zip(keys, values, strict=True) if key not in kept}
    with torch.inference_mode(False):  # the model may be trained later
        copies = {key: torch.empty_like(one) for key, one in sources.items()}
    copy_tensors(list(copies.values()), list(sources.values()), "applying weights", serial=True)
    return [copies.get(key, one) for key, one in zip(keys, values, strict=True)]


class EngineTarget(Target):
    """An inference engine, which takes weights and hands none out."""

    takes_over = True

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine, self.keeps_tensors = engine, engine.keeps_tensors
        self._dtypes: dict[str, torch.dtype] = {}

    def schema(self) -> WeightSchema | None:
        expected: object = self._engine.expected_weights()
        if not isinstance(expected, Mapping | None):
            raise UnsupportedSourceError(
                f"{type(self._engine).__name__}.expected_weights() returned an object of type "
                f"{type(expected).__name__}; return a dict of tensors by name, or None"
            )
        schema = None if expected is None else WeightSchema.of(expected)
        self._dtypes = {} if schema is None else dict(zip(schema.names, schema.dtypes, strict=True))
        return schema

    def read(self) -> NamedWeights:
        return NamedWeights({})

    def device_for(self, payload: torch.Tensor) -> torch.device:
        return payload.device

    def write(self, names: tuple[str, ...], values: list[torch.Tensor], version: int) -> None:
        self._begin(version).load(zip(names, values, strict=True))
        self.finish()
        for value in {value.device: value for value in values}.values():
            await_gpu(value)  # the sender may write there next, and the engine may read on any stream

    def move(self, names: tuple[str, ...], values: list[torch.Tensor]) -> None:
        self._engine.load_weights(as_expected(zip(names, values, strict=True), self._dtypes))

    @property
    def loads_changes(self) -> bool:
        """Whether a patch goes to :meth:`write_changes`, not :meth:`write`."""
        return self._engine.loads_changes and not self.keeps_tensors

    def needs_with(self, changed: Collection[str]) -> Collection[str]:
        """Return the further weights that the engine needs in :meth:`write_changes`."""
        with engine_errors():
            return self._engine.needs_with(changed)

    def write_changes(
        self,
        changes: Iterable[WeightChange],
        whole: Iterable[tuple[str, torch.Tensor]],
        base: int,
        version: int,
    ) -> None:
        """Have the engine load the changes from version ``base`` to ``version``.

        An engine that has lost the weights of ``base`` loads the ``whole`` ones of ``version`` instead.
        """
        loading = self._begin(version)
        try:
            loading.load_changes(changes, base)
        except BaseLostError as error:
            _log.warning("all weights of version %d are loaded, not only a patch: %s", version, error)
            loading.load(whole)
        self.finish()

    def loads_in_chunks(self, header: Mapping[str, Any], decoder: Callable[[str], Decoder]) -> bool:
        """Return whether the engine loads an UPDATE chunk by chunk, without waiting for all of it."""
        alone = header["base"] is None and header["commit"] and header["group"] is None
        able = self._engine.loads_in_chunks and not self.keeps_tensors
        return able and alone and decoder(header["encoding"]).in_chunks

    def load_chunk(self, chunk: WeightChunk, decoder: Decoder, schema: WeightSchema) -> None:
        """Have the engine load the weights that are complete with ``chunk``; the chunk is not read later."""
        loading = self.loading or self._begin(chunk.header["version"])
        loading.take(chunk, decoder, schema)
        if chunk.payload is not None:
            await_gpu(chunk.payload)

    def finish(self) -> Loading:
        """Finish the version of which all chunks were loaded, and return its account."""
        loading = self.loading
        assert loading is not None
        loading.finish()
        self.loading = None
        return loading

    def abort(self) -> None:
        loading, self.loading = self.loading, None
        if loading is not None:
            loading.abort()

    def _begin(self, version: int) -> Loading:
        self.loading = Loading(self._engine, version, self._dtypes)
        return self.loading


def require_target(model: Any) -> None:
    """Raise UnsupportedSourceError if there is no target for a model of this type."""
    if model is not None and not isinstance(model, InferenceEngine):
        require_writable(model)


def target_for(model: Any, strategy: WeightStrategy, stable: bool) -> Target:
    """Return the target for a module, TensorDict, dict or inference engine; None is memory alone."""
    if model is None:
        return Target()
    if isinstance(model, InferenceEngine):
        return EngineTarget(model)
    return ModelTarget(strategy, model, stable)


@dataclass
class StagedUpdate:
    """An update that arrived completely and was checked. The update in force keeps this form."""

    version: int
    group: str | None  # name of the step that switches several models together; None for one model
    payloads: list[torch.Tensor] = field(repr=False)  # received memory that the values lie in
    # One tensor for each schema entry; empty where an engine has the weights.
    values: list[torch.Tensor] = field(repr=False)
    extra: dict[str, Any] = field(repr=False)  # extra state by name
    storage: Storage  # memory that the weights come to lie in
    base: int | None = None  # version that `deltas` change; None for an update of all weights
    deltas: list[Delta] = field(default_factory=list)
    # Values before they were converted to what the target takes, until Storage.begin().
    received: list[torch.Tensor] = field(default_factory=list, repr=False)
    # Payloads that nobody reads once the update is in force, until they are released.
    used_up: list[torch.Tensor] = field(default_factory=list, repr=False)
    arrived: float = field(default_factory=time.perf_counter)
    stall: float = 0.0  # seconds for which forward passes were kept out
    undo: Callable[[], None] = lambda: None  # reverts Staging.begin()

    def named(self) -> NamedWeights:
        """Return the weights by name; none where an engine has them."""
        weights = zip(self.storage.schema.names, self.values, strict=bool(self.values))
        return NamedWeights(dict(weights), self.extra)


class Storage:
    """The memory that the weights of a version lie in: here, the payloads that they arrived in.

    An update goes through :meth:`stage` while forward passes run, then through :meth:`begin` and
    :meth:`switch` while they wait.
    """

    def __init__(self, schema: WeightSchema) -> None:
        self.schema = schema

    def stage(self, update: StagedUpdate, target: Target) -> None:
        """Do everything that may fail or take long, before any forward pass has to wait."""
        update.received = update.values
        update.values = target.prepare(self.schema, update.received)

    def begin(self, update: StagedUpdate, target: Target) -> None:
        """Make sure that the update can be switched to; raise if it cannot.

        Since :meth:`stage`, the program may have replaced, moved or cast tensors, inside ``hold()`` for
        example.
        """
        received, update.received = update.received, []
        if target.binding is not None and target.binding.changed(self.schema.names):
            update.values = target.prepare(self.schema, received)

    def settle(self) -> None:
        """Do work for the next update, after the sender was told that this one is in force."""

    def switch(self, update: StagedUpdate, target: Target) -> None:
        """Put the update in force; only an engine may still raise."""
        target.write(self.schema.names, update.values, update.version)
        if not target.keeps_tensors:
            update.used_up, update.payloads, update.values = update.payloads, [], []
