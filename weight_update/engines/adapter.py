"""One version of the weights on its way into an inference engine."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping

import torch

from weight_update.encodings import Decoder
from weight_update.engines.base import InferenceEngine, WeightChange
from weight_update.errors import FormatError, SchemaMismatchError, TransportError, WorkerError
from weight_update.wire.frames import WeightChunk, payloads_of
from weight_update.wire.schema import WeightSchema

_log = logging.getLogger(__name__)


class Loading:
    """One version on its way into an engine. The constructor calls ``begin_update`` of the engine.

    The engine expects weights in ``dtypes``, by name; other weights keep the sender's. ``count`` weights were
    loaded so far.
    """

    def __init__(self, engine: InferenceEngine, version: int, dtypes: Mapping[str, torch.dtype]) -> None:
        self._engine, self._version, self._dtypes = engine, version, dtypes
        self.since = time.perf_counter()
        self.count = 0
        with engine_errors():
            engine.begin_update(version)

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self.since

    @torch.no_grad()
    def load(self, items: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Have the engine load some weights; raise SchemaMismatchError if it did not take all of them."""
        weights = self._converted(items)
        with engine_errors():
            self._engine.load_weights(weights)
        left = tuple(name for name, _ in weights)
        if left:
            raise SchemaMismatchError("load_weights() returned before it took all weights; it left:", left)

    @torch.no_grad()
    def load_changes(self, changes: Iterable[WeightChange], base: int) -> None:
        """Have the engine load a patch; raise SchemaMismatchError if it did not take all changes."""
        offered = map(self._converted_change, changes)
        with engine_errors():
            self._engine.load_changes(offered, base)
        if left := tuple(change.name for change in offered):
            raise SchemaMismatchError("load_changes() returned before it took all changes; it left:", left)

    def take(self, chunk: WeightChunk, decoder: Decoder, schema: WeightSchema) -> None:
        """Have the engine load the weights that ``chunk`` completes; FormatError if it does not fit."""
        header, (payload,) = chunk.header, payloads_of([chunk])
        found = decoder.stream(header["index"], payload)
        if found:
            self.load((schema.names[i], value) for i, value in found)
        if header["index"] == header["count"] - 1 and self.count != len(schema.tensors):
            raise FormatError(f"{self.count} of {len(schema.tensors)} weights arrived")

    def finish(self) -> None:
        """Tell the engine that the version is complete."""
        with engine_errors():
            self._engine.finish_update(self._version)

    def abort(self) -> None:
        """Tell the engine that the version will not be completed; log an exception of the engine."""
        try:
            self._engine.abort_update(self._version)
        except Exception:  # noqa: BLE001 - the cause is reported already, or there is nobody to tell
            _log.exception("abort_update(%d) of the engine failed", self._version)

    def _converted(self, items: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for item in as_expected(items, self._dtypes):
            self.count += 1
            yield item

    def _converted_change(self, change: WeightChange) -> WeightChange:
        dtype = self._dtypes.get(change.name, change.weight.dtype)
        return change._replace(values=change.values.to(dtype), weight=change.weight.to(dtype))


def as_expected(
    items: Iterable[tuple[str, torch.Tensor]], dtypes: Mapping[str, torch.dtype]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and weights, in the dtype of ``dtypes`` if it has the name."""
    return ((name, value.to(dtypes.get(name, value.dtype))) for name, value in items)


@contextlib.contextmanager
def engine_errors() -> Iterator[None]:
    """Return a context manager for an engine's calls: an error of its own is not one of our link."""
    try:
        yield
    except (TransportError, FormatError) as error:
        raise WorkerError(f"{type(error).__name__}: {error}") from error
