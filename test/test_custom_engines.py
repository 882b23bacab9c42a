"""Engines of a user keep the contract of engines, which finds what wrong ones do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from engine_parts import Notebook

from weight_update import InferenceEngine, WeightChange
from weight_update.engines import ExclusiveEngine
from weight_update.testing import EngineContract, fingerprint


class NotebookContract(EngineContract):
    """Tests of engines that take any weights."""

    def make_engine(self) -> Notebook:
        return Notebook(changes=True, together=["0.bias", "2.bias"])

    def read_weights(self, engine: Any) -> Mapping[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = engine.loaded
        return weights


class TestNotebook(NotebookContract):
    pass


class TestNotebookInChunks(NotebookContract):
    def make_engine(self) -> Notebook:
        return Notebook(in_chunks=True)


class Keeping(InferenceEngine):
    """An engine that keeps the tensors, and generates with them at once."""

    keeps_tensors = True

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def begin_update(self, version: int) -> None:
        """Nothing to prepare."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.weights = dict(weights)

    def finish_update(self, version: int) -> None:
        """The weights are in force already."""


class TestKeeping(EngineContract):
    def make_engine(self) -> Keeping:
        return Keeping()

    def read_weights(self, engine: Any) -> Mapping[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = engine.weights
        return weights


class Answering(ExclusiveEngine):
    """An engine that has bfloat16 weights of its own, and answers with a hash of them."""

    loads_changes = True

    def __init__(self, loads_in_chunks: bool = True) -> None:
        super().__init__(loads_in_chunks=loads_in_chunks, timeout=5.0)
        self.model: Any = AnsweringContract().make_source().bfloat16()

    def expected_weights(self) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = self.model.state_dict()
        return weights

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        mine = self.model.state_dict()
        for name, value in weights:
            mine[name].copy_(value)

    def answer(self) -> dict[str, str]:
        with self.generating():
            return fingerprint(self.model)


class AnsweringContract(EngineContract):
    """Tests of engines that answer requests."""

    def make_engine(self) -> InferenceEngine:
        return Answering()

    def read_weights(self, engine: Any) -> Mapping[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = engine.model.state_dict()
        return weights

    def generate(self, engine: Any) -> object:
        return engine.answer()


class TestAnswering(AnsweringContract):
    pass


class TestAnsweringStaged(AnsweringContract):
    def make_engine(self) -> Answering:
        return Answering(loads_in_chunks=False)


# -- wrong engines -------------------------------------------------------------------------------------


class Borrowing(Notebook):
    """An engine that keeps tensors without a copy."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.loaded.update(weights)


class Clinging(Keeping):
    """An engine that keeps a tensor of a version after the next one is in force."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.weights = {**dict(weights), **dict(list(self.weights.items())[:1])}


class Late(Keeping):
    """An engine that waits for ``finish_update``, which is not called when the sender leaves."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.loaded = dict(weights)

    def finish_update(self, version: int) -> None:
        self.weights = self.loaded


class Adding(Notebook):
    """An engine that loads patches as if they were differences."""

    def load_changes(self, changes: Iterator[WeightChange], base: int) -> None:
        for change in changes:
            assert change.positions is not None
            self.loaded[change.name].view(-1)[change.positions] += change.values


class Scaling(Notebook):
    """An engine that stores a weight and a bias together, but does not ask for both in ``needs_with``."""

    def load_changes(self, changes: Iterator[WeightChange], base: int) -> None:
        found = {change.name: change.weight.clone() for change in changes}
        layers = {name.partition(".")[0] for name in found}
        for name, mine in self.loaded.items():
            if name.partition(".")[0] in layers:
                self.loaded[name] = found.get(name, torch.zeros_like(mine))


class Swallowing(Notebook):
    """An engine that logs errors."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        with contextlib.suppress(OSError):
            super().load_weights(weights)


class Careless(Notebook):
    """An engine that logs errors of patches."""

    def load_changes(self, changes: Iterator[WeightChange], base: int) -> None:
        with contextlib.suppress(OSError):
            super().load_changes(changes, base)


class Halting(Notebook):
    """An engine that is not ready after a failure."""

    def abort_update(self, version: int) -> None:
        raise ValueError("abort_update() does not work")


class Collecting(Notebook):
    """An engine that keeps weights of an update that failed for the next one."""

    def __init__(self) -> None:
        super().__init__(in_chunks=True)
        self.pending: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.pending.setdefault(name, tensor.clone())

    def finish_update(self, version: int) -> None:
        self.loaded, self.pending = self.pending, {}


class Counting(Notebook):
    """An engine that expects versions without a gap."""

    last = -1

    def begin_update(self, version: int) -> None:
        if version != self.last + 1:
            raise ValueError(f"version {version} after {self.last}")
        self.last = version


class Fusing(Answering):
    """An engine that expects weights by the names under which it stores them."""

    def expected_weights(self) -> dict[str, torch.Tensor]:
        return {name.replace("0.", "1."): value for name, value in super().expected_weights().items()}


class Promising(Answering):
    """An engine that stores weights in another dtype than it declares."""

    def __init__(self) -> None:
        super().__init__()
        self.model = self.model.half()

    def expected_weights(self) -> dict[str, torch.Tensor]:
        return AnsweringContract().make_source().bfloat16().state_dict()


class Clearing(Answering):
    """An engine that makes its weights anew for ``expected_weights()``."""

    def expected_weights(self) -> dict[str, torch.Tensor]:
        if self.version:
            self.model = AnsweringContract().make_source().bfloat16()
        return super().expected_weights()


class Unpausing(Answering):
    """An engine that answers while it is updated, and after a failure."""

    def answer(self) -> dict[str, str]:
        return fingerprint(self.model)


class Silent(Answering):
    """An engine that gives a request that arrives after a failure neither an answer nor an error."""

    def answer(self) -> dict[str, str]:
        while self.version is None:
            time.sleep(0.05)
            if self.version is not None:
                time.sleep(10.0)  # longer than the limit of the test
        return super().answer()


class Impatient(Answering):
    """An engine that fails if it is updated while it answers."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = threading.Lock()

    def begin_update(self, version: int) -> None:
        if self.busy.locked():
            raise RuntimeError("a request is running")
        super().begin_update(version)

    def answer(self) -> dict[str, str]:
        with self.busy:
            time.sleep(0.01)  # longer than between two requests
            return super().answer()


class Stuck(Answering):
    """An engine that does not let requests continue after a failure."""

    def __init__(self) -> None:
        super().__init__()
        self.timeout = 0.2

    def abort_update(self, version: int) -> None:
        self.version = None


def hurried(contract: EngineContract) -> EngineContract:
    contract.limit, contract.moment = 3.0, 0.01
    return contract


def of(contract: EngineContract, kind: Callable[..., InferenceEngine], **options: Any) -> EngineContract:
    """Have ``contract`` test an engine that does not keep requests waiting."""
    contract.make_engine = lambda: kind(**options)  # type: ignore[method-assign]
    contract.moment = contract.limit
    return contract


def notes(kind: type[Notebook], **options: Any) -> EngineContract:
    return of(NotebookContract(), kind, **options)


def keeping(kind: type[Keeping]) -> EngineContract:
    return of(TestKeeping(), kind)


def answering(kind: type[Answering]) -> EngineContract:
    return of(AnsweringContract(), kind)


@pytest.mark.parametrize(
    ("contract", "test", "arguments", "message"),
    [
        (
            notes(Borrowing),
            "every_update_is_exact",
            ("dense",),
            "Does it keep a tensor that is no longer valid",
        ),
        (
            keeping(Clinging),
            "every_update_is_exact",
            ("patch",),
            "other weights than the trainer after version 1",
        ),
        (
            keeping(Late),
            "weights_stay_when_the_trainer_leaves",
            (),
            "than the trainer after the trainer left",
        ),
        (
            notes(Adding, changes=True),
            "patches_of_one_weight",
            (),
            "after version 1 and a change of 0.weight",
        ),
        (
            notes(Scaling, changes=True),
            "patches_of_one_weight",
            (),
            "after version 1 and a change of 0.weight",
        ),
        (
            notes(Notebook, changes=True, together=["0.weight", "x"]),
            "patches_of_one_weight",
            (),
            "needs_with",
        ),
        (notes(Counting), "a_trainer_that_starts_again", (), "version 0 after 2"),
        (answering(Fusing), "expected_weights", (), "has other names or shapes than make_source"),
        (answering(Promising), "expected_weights", (), "torch.float16.*, not torch.bfloat16"),
        (
            answering(Clearing),
            "a_trainer_with_other_weights_is_refused",
            ("shape",),
            "engine changed, though",
        ),
        (notes(Swallowing), "an_update_that_fails", ("dense", "first weight"), "before it took all weights"),
        (
            notes(Swallowing),
            "an_update_that_fails",
            ("dense", "last weight"),
            r"load_weights\(\) returned, though its iterator had raised",
        ),
        (
            notes(Careless, changes=True),
            "a_patch_that_fails",
            ("first weight",),
            "before it took all changes",
        ),
        (notes(Halting), "an_update_that_fails", ("patch", "finish"), r"abort_update\(\) raised ValueError"),
        (notes(Collecting), "an_update_that_fails", ("bucket", "last weight"), "failed at: last weight"),
        (answering(Stuck), "an_update_that_fails", ("dense", "finish"), "generation took longer than"),
        (answering(Unpausing), "no_request_sees_a_part_of_an_update", (), "by a mixture of two versions"),
        (answering(Unpausing), "no_request_sees_an_update_that_failed", (), "after an update had failed"),
        (
            hurried(answering(Silent)),
            "no_request_sees_an_update_that_failed",
            (),
            "neither an answer nor an error",
        ),
        (answering(Impatient), "requests_and_updates_at_the_same_time", (), "a request is running"),
    ],
)
def test_the_contract_says_what_an_engine_did_wrong(
    contract: EngineContract, test: str, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises((Exception, pytest.fail.Exception), match=message):
        getattr(contract, f"test_{test}")(*arguments)
