"""An engine that records its calls, and fails on request."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from weight_update import InferenceEngine, WeightChange
from weight_update.testing import Body, fingerprint


class Notebook(InferenceEngine):
    """Keeps the weights that it loaded.

    Args:
        in_chunks: see ``loads_in_chunks``.
        expected: see ``expected_weights``.
        changes: see ``loads_changes``.
        together: see ``needs_with``.

    Attributes:
        calls: what was called, in order; of ``load_weights`` and ``load_changes`` the names.
        loaded: copies of the weights, by name.
        fails: the call that fails once: ``"begin"``, ``"finish"``, or the number of a weight.
        error: type of the error that is raised then.
        stays: number of the weight at which it waits for half a minute.
        skips: the number of weights that it leaves, once.
    """

    def __init__(
        self,
        in_chunks: bool = False,
        expected: Mapping[str, torch.Tensor] | None = None,
        changes: bool = False,
        together: Collection[str] = (),
    ) -> None:
        self.together = together
        self.loads_in_chunks, self.expected, self.loads_changes = in_chunks, expected, changes
        self.calls: list[tuple[str, Any]] = []
        self.loaded: dict[str, torch.Tensor] = {}
        self.fails: str | int | None = None
        self.error: type[Exception] = ZeroDivisionError
        self.stays: int | None = None
        self.skips = 0
        self._seen = 0

    def expected_weights(self) -> Mapping[str, torch.Tensor] | None:
        return self.expected

    def begin_update(self, version: int) -> None:
        self._fail_at("begin")
        self.calls.append(("begin", version))
        self._seen = 0

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in self._noted("load", weights):
            self.loaded[name] = tensor.clone()

    def load_changes(self, changes: Iterator[WeightChange], base: int) -> None:
        for name, positions, values, weight in self._noted(f"changes of {base}", changes):
            if positions is None:
                self.loaded[name] = values.clone()
            else:
                bits = self.loaded[name].view(-1).view(torch.uint8).view(-1, weight.element_size())
                bits[positions] = values.view(torch.uint8).view(-1, weight.element_size())
            assert fingerprint({name: self.loaded[name]}) == fingerprint({name: weight})

    def _noted(self, call: str, items: Iterator[Any]) -> Iterator[Any]:
        """Note a call and the names of its items; fail, wait or end early where the test says so."""
        names: list[str] = []
        self.calls.append((call, names))
        for item in items:
            self._fail_at(self._seen)
            if self.stays == self._seen:
                time.sleep(30.0)
            names.append(item[0])
            yield item
            self._seen += 1
            if self.skips:
                self.skips -= 1
                return

    def needs_with(self, changed: Collection[str]) -> Collection[str]:
        return self.together if set(self.together) & set(changed) else ()

    def finish_update(self, version: int) -> None:
        self._fail_at("finish")
        self.calls.append(("finish", version))

    def abort_update(self, version: int) -> None:
        self.calls.append(("abort", version))

    def _fail_at(self, place: str | int) -> None:
        if self.fails == place:
            self.fails = None
            raise self.error(f"the engine broke at {place}")


class Pointing(InferenceEngine):
    """Keeps the tensors of the version in force, and checks that nobody writes to them meanwhile.

    Attributes:
        kept: the tensors, by name.
        loaded: fingerprints of the tensors when they were loaded.
        fails: whether ``load_weights`` fails once.
    """

    keeps_tensors = True

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}
        self.loaded: dict[str, str] = {}
        self.fails = False

    def require_unchanged(self) -> None:
        assert fingerprint(self.kept) == self.loaded

    def begin_update(self, version: int) -> None:
        self.require_unchanged()

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.require_unchanged()
        self.kept = dict(weights)
        if self.fails:
            self.fails = False
            raise ZeroDivisionError("the engine broke")
        self.loaded = fingerprint(self.kept)

    def finish_update(self, version: int) -> None:
        self.require_unchanged()

    def abort_update(self, version: int) -> None:
        self.kept, self.loaded = {}, {}


# For Body.run, in the worker:


def set_in_engine(body: Body, name: str, value: Any) -> None:
    """Set an attribute of the engine."""
    setattr(body.model, name, value)


def calls(body: Body) -> list[tuple[str, Any]]:
    """Return the calls of the engine since the last question."""
    noted = list(body.model.calls)
    body.model.calls.clear()
    return noted


def loaded(body: Body) -> dict[str, str]:
    """Return the fingerprint of the engine's weights."""
    return fingerprint(body.model.loaded)


def kept(body: Body) -> dict[str, str]:
    """Return the fingerprint of the tensors that the engine keeps."""
    body.model.require_unchanged()
    return dict(body.model.loaded)


def received(body: Body, timeout: float) -> Any:
    """Return the result of ``receive``."""
    return body.scheme.receive(timeout)
