"""How weights enter an inference engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from weight_update.encodings import Decoder
from weight_update.engines.base import InferenceEngine
from weight_update.errors import FormatError, SchemaMismatchError
from weight_update.strategy.named_weights import NamedWeights
from weight_update.wire.frames import WeightChunk
from weight_update.wire.schema import WeightSchema
from weight_update.wire.updates import payloads_of

__all__ = ["EngineBinding", "Loading"]

_log = logging.getLogger(__name__)


class EngineBinding:
    """An engine as a destination; see :class:`~weight_update.strategy.binding.Binding`.

    Args:
        engine: takes the weights; none of them can be read back.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine = engine
        self._dtypes: dict[str, torch.dtype] = {}

    def read(self) -> NamedWeights:
        """Nothing: an engine only takes weights."""
        return NamedWeights({})

    def schema(self) -> WeightSchema | None:
        """The schema of what the engine expects; None if it takes all that the sender has."""
        expected = self.engine.expected_weights()
        self._dtypes = {} if expected is None else {name: one.dtype for name, one in expected.items()}
        return None if expected is None else WeightSchema.of(expected)

    def check_extra(self, extra: Mapping[str, Any]) -> None:
        """Extra state is not for engines."""

    def exchange_extra(self, extra: Mapping[str, Any]) -> Callable[[], None]:
        """Extra state is not for engines; there is nothing to undo."""
        del extra
        return lambda: None

    def prepare(self, names: tuple[str, ...], values: list[torch.Tensor]) -> list[torch.Tensor]:
        """``values`` as they are; each is converted only when the engine takes it."""
        del names
        return values

    def hands_on(self, header: Mapping[str, Any], decoder: Callable[[str], Decoder]) -> bool:
        """Whether an UPDATE goes to the engine chunk by chunk, instead of being put together first."""
        alone = header["base"] is None and header["commit"] and header["group"] is None
        return self.engine.loads_in_chunks and alone and decoder(header["encoding"]).in_chunks

    def begin(self, version: int) -> Loading:
        """Begin a version; raises what the engine raises."""
        return Loading(self.engine, version, self._dtypes)


class Loading:
    """One version on its way into an engine.

    Args:
        engine: its ``begin_update`` is called at once.
        version: which.
        dtypes: by name, where weights are to be converted.

    Attributes:
        since: when it was begun, by ``time.perf_counter``.
        count: number of weights that were loaded.
    """

    def __init__(self, engine: InferenceEngine, version: int, dtypes: Mapping[str, torch.dtype]) -> None:
        self._engine, self._version, self._dtypes = engine, version, dtypes
        self.since = time.perf_counter()
        self.count = 0
        engine.begin_update(version)

    @property
    def seconds(self) -> float:
        """Since it was begun."""
        return time.perf_counter() - self.since

    @torch.no_grad()
    def load(self, items: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Have the engine load these.

        Raises:
            SchemaMismatchError: it did not take them all.
        """
        weights = self._typed(items)
        self._engine.load_weights(weights)
        left = tuple(name for name, _ in weights)
        if left:
            raise SchemaMismatchError("load_weights() returned before it took all weights; it left:", left)

    def take(self, chunk: WeightChunk, decoder: Decoder, schema: WeightSchema) -> None:
        """Have the engine load what is whole with ``chunk``.

        Raises:
            FormatError: the chunk does not fit, or with the last one weights are missing.
            SchemaMismatchError: as :meth:`load`.
        """
        header, (payload,) = chunk.header, payloads_of([chunk])
        found = decoder.stream(header["index"], payload)
        if found:
            self.load((schema.names[i], value) for i, value in found)
        if header["index"] == header["count"] - 1 and self.count != len(schema.tensors):
            raise FormatError(f"{self.count} of {len(schema.tensors)} weights came")

    def finish(self) -> None:
        """The version is complete."""
        self._engine.finish_update(self._version)

    def abort(self) -> None:
        """The version will not be completed."""
        try:
            self._engine.abort_update(self._version)
        except Exception:  # noqa: BLE001 - what led here is reported already, or there is nobody to tell
            _log.exception("abort_update(%d) of the engine failed", self._version)

    def _typed(self, items: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in items:
            self.count += 1
            yield name, value.to(self._dtypes.get(name, value.dtype))
